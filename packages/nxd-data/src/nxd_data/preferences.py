"""Preferences: rows with a prompt and two answers, as tokens and as pairs of sequences.

They are stored like conversations, the chosen answer of a row before the rejected one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxd_data.chat import ChatTemplate, EncodedConversation, EncodedRow
from nxd_data.content_parts import has_images
from nxd_data.conversations import (
    Conversations,
    ConversationSequences,
    cut_lengths,
    spread_held_out,
    warnings_of_thoughts,
)
from nxd_data.messages import Conversation, messages_of, tools_in
from nxd_data.sequences import SampleImage
from nxd_data.stored_images import ImageFiles
from nxd_data.tokenizer import digest_files, load_tokenizer_of_transformers


class PreferenceEncoder:
    """A `RowEncoder` of preferences: texts with a tokenizer, messages with its chat template.

    Args:
        path: the folder of a tokenizer as Hugging Face models ship it, or its tokenizer.json.

    Raises:
        ValueError: there is no such tokenizer, or transformers is not installed.
    """

    marks_answers = True

    def __init__(self, path: str | Path) -> None:
        self._folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self._tokenizer = load_tokenizer_of_transformers(self._folder)
        self._template = ChatTemplate(path) if self._tokenizer.chat_template else None
        files = sorted(it for it in self._folder.iterdir() if it.suffix in (".json", ".model", ".jinja"))
        self.fingerprint = "preferences" + (
            digest_files(files) if self._template is None else self._template.fingerprint
        )

    def encode_row(self, place: str, row: Mapping[str, Any], files: ImageFiles | None = None) -> EncodedRow:
        """Tokenize a row's chosen and rejected answers, each after the prompt, and mark the answers' tokens.

        Columns are as in TRL: `prompt`, `chosen` and `rejected`, all texts or all lists of messages; with messages the
        prompt may be omitted, and is then the common beginning of both answers. Texts get the end-of-text token.

        Raises:
            ValueError: the row lacks these columns, or the chat template refuses it.
        """
        chosen, rejected = row.get("chosen"), row.get("rejected")
        if chosen is None or rejected is None:
            raise ValueError(
                f"{place} is not a preference; expected prompt, chosen and rejected, but it has "
                f"{', '.join(map(str, row)) or 'no columns'}"
            )
        values = [row.get("prompt"), chosen, rejected]
        if all(isinstance(value, str) for value in values):
            return EncodedRow([self._encode_text(values[0], answer) for answer in (chosen, rejected)])
        answers = [messages_of(place, name, row[name]) for name in ("chosen", "rejected")]
        if row.get("prompt") is None:
            prompt, answers = _common_beginning(place, *answers)
        else:
            prompt = messages_of(place, "prompt", row["prompt"])
        if any(has_images(messages) for messages in (prompt, *answers)):
            raise ValueError(f"{place} has images, which preferences do not support; leave them out")
        if self._template is None:
            raise ValueError(
                f"{place} has messages, but {self._folder} has no chat template; set data.tokenizer to the tokenizer "
                "of a chat model, or give texts"
            )
        tools = tools_in(place, row)
        said = [Conversation([*prompt, *answer], tools, len(prompt)) for answer in answers]
        return EncodedRow([self._template.encode(place, conversation) for conversation in said])

    def _encode_text(self, prompt: str, answer: str) -> EncodedConversation:
        end = self._tokenizer.eos_token or ""
        before = self._tokenizer(prompt)["input_ids"]
        ids = self._tokenizer(prompt + answer + ("" if answer.endswith(end) else end))["input_ids"]
        shared = 0
        while shared < min(len(before), len(ids)) and before[shared] == ids[shared]:
            shared += 1
        tokens = np.asarray(ids, dtype=np.int64)
        return EncodedConversation(tokens, np.arange(len(tokens)) >= shared)


def _common_beginning(place: str, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    length = 0
    while length < min(len(chosen), len(rejected)) - 1 and chosen[length] == rejected[length]:
        length += 1
    if not length:
        raise ValueError(f"{place} has no prompt, and chosen and rejected start with different messages; give a prompt")
    return chosen[:length], [chosen[length:], rejected[length:]]


@dataclass(frozen=True)
class PairSequences:
    """Pairs of sequences, numbered from 0; a sample has two rows, the chosen answer and then the rejected one."""

    answers: ConversationSequences  # the sequences of all answers here; those of a pair are adjacent

    @property
    def sequence_length(self) -> int:
        """Tokens per row."""
        return self.answers.sequence_length

    def __len__(self) -> int:
        return len(self.answers) // 2

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return pairs `[count]` as inputs, labels and positions, each `[2 * count, sequence_length]`."""
        return self.answers.rows(_both(samples))

    def count(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Count the tokens of answers, and the tokens without padding, of pairs `[count]` together."""
        return self.answers.count(_both(samples))

    def images(self, samples: NDArray[np.int64]) -> Sequence[Sequence[SampleImage]]:
        """Return the images of pairs `[count]`, `[2 * count]` lists."""
        return self.answers.images(_both(samples))


def cut_preferences(
    conversations: Conversations, *, sequence_length: int, held_out_fraction: float = 0.0
) -> tuple[PairSequences, PairSequences, list[str]]:
    """Return pairs to train on, evenly spaced held-out ones, and warnings about pairs that the length drops.

    Raises:
        ValueError: there are too few pairs with a token of both answers within the length.
    """
    starts, lengths, learned = cut_lengths(conversations, sequence_length)
    pairs = np.flatnonzero(learned.reshape(-1, 2).all(axis=1))
    is_held_out = spread_held_out(len(pairs), len(learned) // 2, sequence_length, held_out_fraction, "pairs")

    def part(chosen: NDArray[np.int64]) -> PairSequences:
        rows = _both(chosen)
        bounds = np.arange(len(rows) + 1)
        answers = ConversationSequences(
            conversations, sequence_length, starts[rows], lengths[rows], learned[rows], bounds
        )
        return PairSequences(answers)

    left_out = len(learned) // 2 - len(pairs)
    told = f"left out: {left_out:,} pairs with an answer entirely beyond data.sequence_length={sequence_length}"
    warnings = warnings_of_thoughts(conversations.index) + ([told] if left_out else [])
    return part(pairs[~is_held_out]), part(pairs[is_held_out]), warnings


def _both(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the answers of pairs: `[2 * count]`."""
    return np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1)
