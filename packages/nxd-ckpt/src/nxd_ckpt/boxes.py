"""Arithmetic on boxes of a global tensor: intersection, difference and coverage.

A box is an axis-aligned block of elements. Everything here is integers; tensors, files and ranks live elsewhere.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements `offsets[d] <= i < offsets[d] + shape[d]` of a global tensor; a 0-d box holds one element."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def num_elements(self) -> int:
        """How many elements lie in the box."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index, per dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))

    def fits_in(self, global_shape: tuple[int, ...]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(self.shape) == len(global_shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for offset, size, whole in zip(self.offsets, self.shape, global_shape, strict=True)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes, or None if there are none."""
        offsets, shape = [], []
        for a, a_size, b, b_size in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            start, end = max(a, b), min(a + a_size, b + b_size)
            if start >= end:
                return None
            offsets.append(start)
            shape.append(end - start)
        return Box(tuple(offsets), tuple(shape))

    def relative_to(self, outer: "Box") -> "Box":
        """The same elements, counted from the first element of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The index that picks this box out of a tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def __str__(self) -> str:
        return "[" + ",".join(f"{a}:{b}" for a, b in zip(self.offsets, self.ends, strict=True)) + "]"


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that together hold the elements of `box` that are not in `hole`."""
    if box == hole:
        return []
    common = box.intersect(hole)
    if common is None:
        return [box] if box.num_elements else []
    rest: list[Box] = []
    offsets, ends = list(box.offsets), list(box.ends)
    for dim in range(len(box.shape)):
        # Cut off what lies before and after the hole along this dimension, then go on with the slab in between.
        for start, end in ((offsets[dim], common.offsets[dim]), (common.ends[dim], ends[dim])):
            if start < end:
                lows = [*offsets[:dim], start, *offsets[dim + 1 :]]
                highs = [*ends[:dim], end, *ends[dim + 1 :]]
                rest.append(Box(tuple(lows), tuple(b - a for a, b in zip(lows, highs, strict=True))))
        offsets[dim], ends[dim] = common.offsets[dim], common.ends[dim]
    return rest


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """What is left of `box` when all `covers` are taken out; empty if they cover it."""
    left = [box] if box.num_elements else []
    for cover in covers:
        if not left:
            break
        left = [rest for piece in left for rest in subtract(piece, cover)]
    return left
