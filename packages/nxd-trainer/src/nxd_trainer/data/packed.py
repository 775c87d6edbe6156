"""Packed sequences: the row of tokens is cut into equal pieces, some of which are held out for evaluation.

Piece i covers tokens i * sequence_length to (i + 1) * sequence_length, both included: the last one is only a
label here and the first input of the next piece. In which order pieces are used is in loader.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxd_trainer.data.corpus import Corpus

NUM_ZONES = 64


@dataclass(frozen=True)
class PackedSequences:
    """Some of the pieces of a row of tokens, numbered from 0.

    Attributes:
        tokens: `[num_tokens]`, the whole row.
        sequence_length: tokens of a piece, the label of the last one not counted.
        starts: `[runs]` first piece of each run of neighbouring pieces that belong here.
        lengths: `[runs]` pieces of each run.
    """

    tokens: NDArray[Any]
    sequence_length: int
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def take(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of samples `[count]` as `[count, sequence_length + 1]`."""
        ends = np.cumsum(self.lengths)
        runs = np.searchsorted(ends, samples, side="right")
        pieces = self.starts[runs] + samples - (ends - self.lengths)[runs]
        taken = np.empty((len(samples), self.sequence_length + 1), dtype=np.int64)
        for row, piece in enumerate(pieces):
            first = int(piece) * self.sequence_length
            taken[row] = self.tokens[first : first + self.sequence_length + 1]
        return taken


def pack_corpus(
    corpus: Corpus, *, sequence_length: int, held_out_fraction: float = 0.0
) -> tuple[PackedSequences, PackedSequences]:
    """Cut a corpus into pieces and split them into those to train on and those held out.

    The row is divided into up to 64 zones, and the last pieces of each zone are held out: that part is made
    of long passages from all over the corpus. With a fraction above 0 both parts have at least one piece.

    Raises:
        ValueError: too few tokens for one piece (two, where some are held out).
    """
    num_pieces = max(0, len(corpus.tokens) - 1) // sequence_length
    least_pieces = 2 if held_out_fraction > 0 else 1
    if num_pieces < least_pieces:
        raise ValueError(
            f"the data has {len(corpus.tokens)} tokens; data.sequence_length={sequence_length} with "
            f"data.held_out_fraction={held_out_fraction} needs {least_pieces * sequence_length + 1}: "
            "add text or lower data.sequence_length"
        )
    num_held_out = round(num_pieces * held_out_fraction)
    num_held_out = min(max(num_held_out, least_pieces - 1), num_pieces - 1)
    # No more zones than pieces of either part, so that no zone is asked to hold out more than it has.
    num_zones = max(1, min(NUM_ZONES, num_held_out, num_pieces - num_held_out))
    zone_ends = np.arange(1, num_zones + 1) * num_pieces // num_zones
    zone_starts = np.concatenate([[0], zone_ends[:-1]])
    held_out_ends = np.arange(1, num_zones + 1) * num_held_out // num_zones
    held_out_lengths = np.diff(held_out_ends, prepend=0)
    train_lengths = zone_ends - zone_starts - held_out_lengths
    return (
        PackedSequences(corpus.tokens, sequence_length, zone_starts, train_lengths),
        PackedSequences(corpus.tokens, sequence_length, zone_ends - held_out_lengths, held_out_lengths),
    )
