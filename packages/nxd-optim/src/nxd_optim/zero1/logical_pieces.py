"""Maps ranges of flattened parameters to elements of the logical model.

Pure arithmetic on shapes: a range of an N-d tensor in C order is a handful of boxes, and each box is looked up in
the parameter's `ShardSpec`. Buffers, ranks and optimizer states live elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nxd_state import Box, ShardSpec
from torch import Tensor


@dataclass(frozen=True)
class FlatPiece:
    """Elements of a flat range that form a box of a logical tensor.

    Attributes:
        block_start: start of a contiguous block, counted from the first element of the range.
        block_shape: shape of the block as an N-d tensor.
        inner: the box of these elements in the block.
        logical: the same elements as a box of the logical tensor.
        logical_shape: shape of the whole logical tensor.
        name: name in the `ShardPiece`.
        copies: copies in the `ShardPiece`.
    """

    block_start: int
    block_shape: tuple[int, ...]
    inner: Box
    logical: Box
    logical_shape: tuple[int, ...]
    name: str
    copies: int

    def view(self, flat: Tensor) -> Tensor:
        """Return the piece as a view of a 1-d tensor that holds the whole range, with the shape of `logical`."""
        block = flat[self.block_start : self.block_start + prod(self.block_shape)]
        return block.view(self.block_shape)[self.inner.slices]


def boxes_of_flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements `start:stop` of a tensor in C order as boxes, at most `2 * len(shape) - 1` of them.

    The boxes are disjoint and ordered by their elements; each is contiguous in the flat tensor.

    Raises:
        ValueError: the tensor has no such range.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range {start}:{stop} is outside the {prod(shape)} elements of shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # both ends inside one row
        return _in_row(shape, end_whole, start - end_whole * row, stop - end_whole * row)
    boxes = _in_row(shape, first_whole - 1, start % row, row) if start % row else []
    if first_whole < end_whole:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((first_whole, *zeros), (end_whole - first_whole, *shape[1:])))
    return boxes + (_in_row(shape, end_whole, 0, stop % row) if stop % row else [])


def pieces_of_flat_range(spec: ShardSpec, start: int, stop: int) -> list[FlatPiece]:
    """Return elements `start:stop`, in C order, of a parameter with this spec, by logical tensor, without padding."""
    pieces = []
    block_start = 0
    for block in boxes_of_flat_range(spec.local_shape, start, stop):
        for piece in spec.pieces:
            common = _intersect(block, piece.local)
            if common is not None:
                inner = Box(_minus(common.offset, block.offset), common.shape)
                into_piece = _minus(common.offset, piece.local.offset)
                offset = tuple(a + b for a, b in zip(piece.logical.offset, into_piece, strict=True))
                logical = Box(offset, common.shape)
                pieces.append(
                    FlatPiece(block_start, block.shape, inner, logical, piece.logical_shape, piece.name, piece.copies)
                )
        block_start += block.numel
    return pieces


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """Return the boxes of a range of `shape[1:]`, as boxes of row `row`."""
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes_of_flat_range(shape[1:], start, stop)]


def _intersect(a: Box, b: Box) -> Box | None:
    if not a.overlaps(b):
        return None
    offset = tuple(map(max, a.offset, b.offset))
    ends = (min(p.stop, q.stop) for p, q in zip(a.slices, b.slices, strict=True))
    return Box(offset, tuple(end - start for start, end in zip(offset, ends, strict=True)))


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
