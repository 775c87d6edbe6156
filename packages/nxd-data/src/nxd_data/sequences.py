"""Samples of one length, accessed by number: pieces of a corpus, tokens in memory, and mixtures of several sources.

A corpus is cut into equal pieces, some of which are held out for evaluation. Piece i has the tokens from
i * sequence_length to (i + 1) * sequence_length, inclusive: the last one is only a label here, and the first input of
the next piece. `conversations.py` and `preferences.py` have other sources; `loader.py` determines the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nxd_data.corpus import Corpus

NUM_ZONES = 64
NOT_LEARNED = -100  # label of a token without loss


@dataclass(frozen=True)
class SampleImage:
    """An image of a sample."""

    start: int  # first of its tokens in the sample's inputs
    end: int  # end of its tokens
    label: str  # its name and size, for people
    open: Callable[[], Any]  # decodes it: a `PIL.Image`, RGB


class Sequences(Protocol):
    """A source of samples of one length."""

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return samples `[count]`, by number, as inputs, labels and positions, each `[count, sequence_length]`."""

    def count(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Count the labels in the loss, and the tokens without padding, of samples `[count]` together."""

    def images(self, samples: NDArray[np.int64]) -> Sequence[Sequence[SampleImage]]:
        """Return the images of samples `[count]`, each a list in the order of their tokens in `rows`."""


@dataclass(frozen=True)
class TokenRows:
    """Samples in memory: tokens `[samples, sequence_length + 1]`."""

    tokens: NDArray[np.int64]

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.tokens.shape[1] - 1

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return samples `[count]` as inputs, next tokens and positions, each `[count, sequence_length]`."""
        taken = self.tokens[samples]
        inputs = taken[:, :-1]
        return inputs, taken[:, 1:], np.broadcast_to(np.arange(self.sequence_length), inputs.shape)

    def count(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Count the labels in the loss, and the tokens, of samples `[count]` together: all of them."""
        num_tokens = len(samples) * self.sequence_length
        return num_tokens, num_tokens

    def images(self, samples: NDArray[np.int64]) -> Sequence[Sequence[SampleImage]]:
        """Return no images for each of the samples `[count]`."""
        return [()] * len(samples)


@dataclass(frozen=True)
class PackedSequences:
    """Some pieces of the tokens, numbered from 0."""

    tokens: NDArray[Any]  # `[num_tokens]`, all tokens
    sequence_length: int  # tokens per piece, without the last label
    starts: NDArray[np.int64]  # `[runs]` first piece of each run of adjacent pieces that belong here
    lengths: NDArray[np.int64]  # `[runs]` number of pieces in each run

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def take(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of samples `[count]` as `[count, sequence_length + 1]`."""
        ends = np.cumsum(self.lengths)
        runs = np.searchsorted(ends, samples, side="right")
        pieces = self.starts[runs] + samples - (ends - self.lengths)[runs]
        taken = np.empty((len(samples), self.sequence_length + 1), dtype=np.int64)
        for row, piece in enumerate(pieces):
            first = int(piece) * self.sequence_length
            taken[row] = self.tokens[first : first + self.sequence_length + 1]
        return taken

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return samples `[count]` as inputs, next tokens and positions, each `[count, sequence_length]`."""
        return TokenRows(self.take(samples)).rows(np.arange(len(samples)))

    def count(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Count the labels in the loss, and the tokens, of samples `[count]` together: all of them."""
        num_tokens = len(samples) * self.sequence_length
        return num_tokens, num_tokens

    def images(self, samples: NDArray[np.int64]) -> Sequence[Sequence[SampleImage]]:
        """Return no images for each of the samples `[count]`."""
        return [()] * len(samples)


def pack_corpus(
    corpus: Corpus, *, sequence_length: int, held_out_fraction: float = 0.0
) -> tuple[PackedSequences, PackedSequences]:
    """Cut a corpus into pieces and split them into training and held-out pieces.

    The tokens are divided into up to 64 zones, and the last pieces of each zone are held out, so the held-out part has
    long passages from all over the corpus. With a fraction above 0 both parts have at least one piece.

    Raises:
        ValueError: there are too few tokens for one piece (two, if some are held out).
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
    # No more zones than pieces of either part, so that no zone has to hold out more than it has.
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


@dataclass(frozen=True)
class MixedSequences:
    """Samples of several sources, numbered from 0, in source order.

    An epoch has every sample of every source at least once, and repeats samples as the weights require. So its length
    depends only on counts and weights, and the order does not depend on the layout.
    """

    parts: Sequence[Sequences]  # the sources, each with at least one sample
    ends: NDArray[np.int64]  # `[parts]` samples of an epoch up to the end of each part

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.parts[0].sequence_length

    def __len__(self) -> int:
        return int(self.ends[-1])

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return samples `[count]` as inputs, labels and positions, each `[count, sequence_length]`."""
        taken = np.empty((3, len(samples), self.sequence_length), dtype=np.int64)
        for here, part, numbers in self._by_part(samples):
            taken[:, here] = part.rows(numbers)
        inputs, labels, positions = taken
        return inputs, labels, positions

    def count(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Count the labels in the loss, and the tokens without padding, of samples `[count]` together."""
        counts = [part.count(numbers) for _, part, numbers in self._by_part(samples)]
        return sum(learned for learned, _ in counts), sum(seen for _, seen in counts)

    def images(self, samples: NDArray[np.int64]) -> Sequence[Sequence[SampleImage]]:
        """Return the images of samples `[count]`."""
        taken: list[Sequence[SampleImage]] = [()] * len(samples)
        for here, part, numbers in self._by_part(samples):
            for row, images in zip(np.flatnonzero(here), part.images(numbers), strict=True):
                taken[row] = images
        return taken

    def _by_part(self, samples: NDArray[np.int64]) -> list[tuple[NDArray[np.bool_], Sequences, NDArray[np.int64]]]:
        """Return, for each part with some of the samples, a mask `[count]`, the part, and sample numbers in it."""
        owners = np.searchsorted(self.ends, samples, side="right")
        starts = np.concatenate([[0], self.ends[:-1]])
        found = [(owners == index, part, starts[index]) for index, part in enumerate(self.parts)]
        return [(here, part, (samples[here] - start) % len(part)) for here, part, start in found if here.any()]


def mix(parts: Sequence[Sequences], weights: Sequence[float]) -> Sequences:
    """Combine sources into one; empty parts are dropped, and a single one is returned as is.

    Args:
        parts: one or more sources with the same sequence length.
        weights: `[parts]`, each source's share of the samples, above 0; their sum does not matter.
    """
    filled = [(part, weight) for part, weight in zip(parts, weights, strict=True) if len(part)]
    if len(filled) < 2:
        return filled[0][0] if filled else parts[0]
    length = max(len(part) / weight for part, weight in filled)  # of an epoch, if the weights added up to 1
    counts = [max(len(part), round(length * weight)) for part, weight in filled]
    return MixedSequences([part for part, _ in filled], np.cumsum(counts))


def read_weights(sources: Mapping[str, Any]) -> dict[str, float]:
    """Return the weight of each source by its path.

    Raises:
        ValueError: there are no sources, or a weight is not a number above 0.
    """
    if not sources:
        raise ValueError('data.sources is empty; give paths and weights, such as {"books" = 0.7, "code" = 0.3}')
    for path, weight in sources.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise ValueError(f"data.sources: {path} has weight {weight}; expected a number above 0")
    return {path: float(weight) for path, weight in sources.items()}
