"""The shuffled order of the samples, as a function: position in an epoch to number of a sample.

A keyed permutation (a Feistel network, walked until it lands inside the range) instead of a shuffled array:
it needs no memory, any position can be asked for at once, and the order stays the same with every version of
numpy and torch, so that an old checkpoint resumes on the data it would have seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 6
MASK_64 = (1 << 64) - 1


def shuffled(positions: NDArray[np.int64], num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples at these positions of a shuffled epoch.

    Over all positions 0 .. num_samples - 1 each sample comes exactly once; seed and epoch choose the order.

    Args:
        positions: `[count]`, each at least 0 and below `num_samples`.
        num_samples: samples in an epoch.
        seed: of the run.
        epoch: from 0.

    Returns:
        `[count]` numbers of samples, in the order of the positions.
    """
    # Numbers are two halves of equal width. Narrower than three bits each, these would mix badly.
    half_bits = max(3, ((num_samples - 1).bit_length() + 1) // 2)
    keys = [_mix(_mix(_mix(seed) ^ epoch) + round_number) for round_number in range(NUM_ROUNDS)]
    samples = _permute(positions.astype(np.uint64), half_bits, keys)
    while (outside := samples >= num_samples).any():
        samples[outside] = _permute(samples[outside], half_bits, keys)
    return samples.astype(np.int64)


def _permute(numbers: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """A permutation of 0 .. 4**half_bits - 1: each round changes one half by a function of the other."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ np.uint64(key)) & mask)
    return (left << bits) | right


def _mix(number: int) -> int:
    """SplitMix64: a 64-bit number whose every bit depends on every bit of the given one."""
    number = (number + 0x9E3779B97F4A7C15) & MASK_64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK_64
    return number ^ (number >> 31)


def _mix_array(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The last steps of `_mix`, element by element; unsigned arrays wrap around by themselves."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
