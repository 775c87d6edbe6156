"""Mixes several sources by weight: each weight is a share of the samples.

An epoch of a mixture has every sample of every source at least once, and repeats samples as the weights require. So its
length depends only on counts and weights, samples can be accessed at random, and the order does not depend on the
layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxd_trainer.data.loader import Sequences


@dataclass(frozen=True)
class MixedSequences:
    """Samples of several sources, numbered from 0, in source order.

    Attributes:
        parts: the sources, each with at least one sample.
        ends: `[parts]` samples of an epoch up to the end of each part.
    """

    parts: Sequence[Sequences]
    ends: NDArray[np.int64]

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
        weights: `[parts]`, above 0; their sum does not matter.
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
