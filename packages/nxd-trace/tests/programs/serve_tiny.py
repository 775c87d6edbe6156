"""Serves the tiny decoder on a free port; tokens 0..25 are letters, and token 31 ends a text.

    python serve_tiny.py [LIMITS [RESTARTS [STEPS]]]

The first two are JSON, as `ServerLimits` and `RestartPolicy` have them. The workers' process ids and the model's folder
are printed. After so many STEPS of the model each further one waits for a line on standard input.
"""

import json
import sys
from collections.abc import Iterable

import tiny_decoder
from nxd_trace.generation import compile_generator
from nxd_trace.serving import CompletionService, RestartPolicy, ServerLimits, serve

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?"


class Letters:
    """A token per letter."""

    vocab_size = 32
    end_of_document = 31

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(LETTERS[token] for token in tokens if token < self.end_of_document)


def gate(engine, num_steps: int) -> None:
    step = engine.step
    free = iter(range(num_steps))

    def gated_step():
        if next(free, None) is None:
            sys.stdin.readline()
        return step()

    engine.step = gated_step


def main(limits: str = "{}", restarts: str = "{}", num_steps: str = "") -> None:
    sizes = {"batch_size": 2, "max_length": 40, "prefill_lengths": (4,), "tp_degree": 1}
    with compile_generator(tiny_decoder.TinyDecoder, compiler="export", progress=False, **sizes) as generator:
        if num_steps:
            gate(generator.engine, int(num_steps))
        print(json.dumps({"workers": generator.model.worker_pids, "folder": str(generator.model.folder)}), flush=True)
        policy = {"limits": ServerLimits(**json.loads(limits)), "restarts": RestartPolicy(**json.loads(restarts))}
        serve(CompletionService(generator.engine, Letters(), model="tiny", **policy), port=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
