"""Arithmetic on boxes of a global tensor: intersection, difference and coverage.

A box is an axis-aligned block of elements. This file only has integer arithmetic; tensors and files are elsewhere.
"""

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """The elements `offsets[d] <= i < offsets[d] + shape[d]` of a global tensor; a 0-d box holds one element.

    It is a tuple, since plans of large models hash, compare and send hundreds of thousands of boxes.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box of a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def num_elements(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))

    def fits_in(self, global_shape: tuple[int, ...]) -> bool:
        """Whether the box is inside a tensor of this shape."""
        return len(self.shape) == len(global_shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for offset, size, whole in zip(self.offsets, self.shape, global_shape, strict=True)
        )

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` is in this box."""
        return all(
            a <= b and b + b_size <= a + a_size
            for a, a_size, b, b_size in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """Return the elements in both boxes, or None if there are none."""
        offsets, shape = [], []
        for a, a_size, b, b_size in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            start, end = max(a, b), min(a + a_size, b + b_size)
            if start >= end:
                return None
            offsets.append(start)
            shape.append(end - start)
        return Box(tuple(offsets), tuple(shape))

    def relative_to(self, outer: "Box") -> "Box":
        """Return the same elements, counted from the first element of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index: `tensor[box.slices]` is a view of it."""
        return tuple(map(slice, self.offsets, self.ends))

    def __str__(self) -> str:
        return "[" + ",".join(f"{a}:{b}" for a, b in zip(self.offsets, self.ends, strict=True)) + "]"


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that hold the elements of `box` outside of `hole`."""
    if box == hole:
        return []
    common = box.intersect(hole)
    if common is None:
        return [box] if box.num_elements else []
    rest: list[Box] = []
    offsets, ends = list(box.offsets), list(box.ends)
    for dim in range(len(box.shape)):
        # Cut off the parts before and after the hole along this dimension, then continue with the slab in between.
        for start, end in ((offsets[dim], common.offsets[dim]), (common.ends[dim], ends[dim])):
            if start < end:
                lows = [*offsets[:dim], start, *offsets[dim + 1 :]]
                highs = [*ends[:dim], end, *ends[dim + 1 :]]
                rest.append(Box(tuple(lows), tuple(b - a for a, b in zip(lows, highs, strict=True))))
        offsets[dim], ends[dim] = common.offsets[dim], common.ends[dim]
    return rest


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Return the parts of `box` outside of all `covers`; empty if they cover it."""
    covers = list(covers)
    if _covered_by_slabs(box, covers):
        return []
    left = [box] if box.num_elements else []
    for cover in covers:
        if not left:
            break
        left = [rest for piece in left for rest in subtract(piece, cover)]
    return left


def _covered_by_slabs(box: Box, covers: "list[Box]") -> bool:
    """Whether the covers are the usual case, which is fast to check: slabs along dim 0, in order, without a gap."""
    if not box.shape:
        return bool(covers)
    reached, end = box.offsets[0], box.offsets[0] + box.shape[0]
    others = (box.offsets[1:], box.shape[1:])
    for offsets, shape in covers:
        if reached < end and offsets[0] <= reached and (offsets[1:], shape[1:]) == others:
            reached = max(reached, offsets[0] + shape[0])
    return reached >= end


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield disjoint boxes that make up the elements `start` to `stop` - 1 of a row-major array, in order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, first_rest), (last, last_rest) = divmod(start, inner), divmod(stop, inner)

    def in_row(row: int, row_start: int, row_stop: int) -> Iterator[Box]:
        for box in boxes_of_range(shape[1:], row_start, row_stop):
            yield Box((row, *box.offsets), (1, *box.shape))

    if first == last:
        yield from in_row(first, first_rest, last_rest)
        return
    if first_rest:
        yield from in_row(first, first_rest, inner)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    yield from in_row(last, 0, last_rest)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collector inside the block, and restore its state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
