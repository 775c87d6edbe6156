"""Serves the tiny decoder at a free port, whose tokens 0..25 are letters and whose token 31 ends a text."""

from collections.abc import Iterable

import tiny_decoder
from nxd_trace.generation import compile_generator
from nxd_trace.serving import CompletionService, serve

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?"


class Letters:
    """A token per letter."""

    vocab_size = 32
    end_of_document = 31

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(LETTERS[token] for token in tokens)


def main() -> None:
    sizes = {"batch_size": 2, "max_length": 40, "prefill_lengths": (4,), "tp_degree": 1}
    with compile_generator(tiny_decoder.TinyDecoder, compiler="export", progress=False, **sizes) as generator:
        serve(CompletionService(generator.engine, Letters(), model="tiny"), port=0)


if __name__ == "__main__":
    main()
