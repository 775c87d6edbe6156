"""How far two tensors are apart, and how far they may be: what rounding explains.

In float64 and float32 a fixed share of the tensor's largest value, which is far above rounding and far below mistakes.
Below them, and where a program amplifies rounding, the spread of recordings of the reference with noise.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_parity.digest import largest_of

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SHARE_OF_PARAMETERS = 0.1  # the same of parameters after a step: Adam moves those without a gradient by its rounding
PRECISE = (torch.float64, torch.float32)  # whose tolerances are far below mistakes, so that noise only widens them
SMALL_SHARE = 1e-3  # tensors far below their peers, such as gradients of pure rounding, use this share as scale
TIMES_SPREAD = 8.0
TIMES_MEAN_SQUARE = 4.0  # of many elements, whose mean square says more than that of a few
MANY_ELEMENTS = 64
MOST_OF_DIFFERENCE = 4.0
LEAST_NOISE, FEW_ELEMENTS = 0.5, 8  # a share of a tensor's size, and elements of which noise says little
MOST = sys.float_info.max  # a bound of all finite differences
ELEMENTS = 2**18  # that are compared at once: some MiB of float64, which fit into a core's cache


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from the expected one.

    Attributes:
        largest: the largest absolute difference.
        relative: the same, relative to the largest expected value.
        mean_square: the root of the mean square of differences.
        index: where the largest difference is.
        expected: the value there.
        found: the value there.
    """

    largest: float
    relative: float
    mean_square: float
    index: tuple[int, ...]
    expected: float
    found: float


def distance(expected: Tensor, found: Tensor) -> Distance:
    """Measure how far apart two tensors of one shape are. NaN equals NaN only.

    It reads a part at a time: tensors of files that are mapped into memory may be larger than the memory.
    """
    if expected.numel() == 0:
        return Distance(0.0, 0.0, 0.0, (), 0.0, 0.0)
    scale = squares = 0.0
    largest, at, wanted_there, got_there = -1.0, 0, 0.0, 0.0
    for start, part, other in _parts(expected, found):
        wanted, got = part.double().flatten(), other.double().flatten()
        apart = wanted.sub(got).abs_()
        most = float(apart.max())
        if not math.isfinite(most):
            apart.masked_fill_(wanted.isnan() & got.isnan() | (wanted == got), 0.0)
            apart = apart.nan_to_num_(nan=math.inf, posinf=math.inf)
            most = float(apart.max())
        scale = max(scale, _largest_number(part))
        squares += float(apart.dot(apart))
        if most > largest:
            index = int(apart.argmax())
            largest, at, wanted_there, got_there = most, start + index, float(wanted[index]), float(got[index])
    return Distance(
        largest,
        largest / scale if scale else (math.inf if largest else 0.0),
        math.sqrt(squares / expected.numel()),
        tuple(int(it) for it in torch.unravel_index(torch.tensor(at), expected.shape)),
        wanted_there,
        got_there,
    )


def _parts(expected: Tensor, found: Tensor, start: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield both tensors in parts of some MiB along the first dims, with the position of each in the flat tensor."""
    if expected.numel() <= ELEMENTS or not expected.dim():
        yield start, expected, found
        return
    of_row = expected.numel() // expected.shape[0]
    if of_row > ELEMENTS:
        for row, (a, b) in enumerate(zip(expected, found, strict=True)):
            yield from _parts(a, b, start + row * of_row)
        return
    rows = ELEMENTS // of_row
    for row in range(0, expected.shape[0], rows):
        yield start + row * of_row, expected[row : row + rows], found[row : row + rows]


def _largest_number(tensor: Tensor) -> float:
    """Return the largest absolute value, as if NaN were 0 and infinity the largest number of the dtype."""
    largest = largest_of(tensor)
    return largest if math.isfinite(largest) else tensor.double().abs().nan_to_num().max().item()


@dataclass(frozen=True)
class Bound:
    """The largest differences that are rounding.

    Attributes:
        largest: bound of the largest absolute difference.
        mean_square: bound of the root of the mean square.
    """

    largest: float
    mean_square: float

    def of_explanation(self, apart: Distance) -> "Bound":
        """Return the bound for an explanation of a difference: it is to take most of the difference away."""
        return Bound(
            min(self.largest, apart.largest / MOST_OF_DIFFERENCE),
            min(self.mean_square, apart.mean_square / MOST_OF_DIFFERENCE),
        )

    def holds(self, apart: Distance) -> bool:
        """Whether a difference is within the bound."""
        return apart.largest <= self.largest and apart.mean_square <= self.mean_square


def bound_of(
    expected: Tensor, spread: Sequence[Tensor], *, peers: float, rtol: float | None, share: float = SMALL_SHARE
) -> Bound:
    """Return the bound of a tensor's differences.

    Args:
        expected: the tensor of the reference.
        spread: the same tensor in recordings of the reference with noise.
        peers: the largest value in all tensors of its kind.
        rtol: tolerance relative to the tensor's largest value; by default that of its dtype.
        share: the share of `peers` that is the least size by which a tensor without spread is judged.
    """
    scale = _largest_number(expected)
    scale = max(scale, SMALL_SHARE * peers)
    fixed = TOLERANCES.get(expected.dtype, 0.1) if rtol is None else rtol
    if not spread:
        largest = fixed * max(scale, share * peers)
        return Bound(largest, largest)
    apart = [distance(expected, it) for it in spread]
    if expected.dtype not in PRECISE and is_all_noise(expected, max(it.mean_square for it in apart)):
        return Bound(MOST, MOST)
    last_place = torch.finfo(expected.dtype).eps * scale if expected.is_floating_point() else 0.0
    if not expected.dim():
        last_place /= 8  # norms and means of many elements are more precise than one of them
    bound = Bound(
        TIMES_SPREAD * max(*(it.largest for it in apart), last_place),
        (TIMES_MEAN_SQUARE if expected.numel() >= MANY_ELEMENTS else TIMES_SPREAD)
        * max(*(it.mean_square for it in apart), last_place / 8),
    )
    if expected.dtype not in PRECISE:
        # A mean of means is rounded more often, and runs with noise may all round to the same number.
        unit = 0.0 if expected.dim() else torch.finfo(expected.dtype).eps * scale
        return Bound(max(bound.largest, unit), max(bound.mean_square, unit))
    return Bound(max(bound.largest, fixed * scale), max(bound.mean_square, fixed * scale))


def is_all_noise(expected: Tensor, noise: float) -> bool:
    """Whether noise changes a tensor by as much as it is large, so that its values say nothing."""
    if expected.numel() <= FEW_ELEMENTS or noise < LEAST_NOISE / FEW_ELEMENTS * _largest_number(expected):
        return False
    return noise > LEAST_NOISE * distance(torch.zeros_like(expected), expected).mean_square
