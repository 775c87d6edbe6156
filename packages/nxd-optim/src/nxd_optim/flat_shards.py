"""Which boxes of logical tensors a range of a flattened parameter holds.

ZeRO and weight averages cut parameters into ranges of their elements in C order. A range is a handful of boxes of the
parameter, and the parameter's `ShardSpec` says which boxes of logical tensors these are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nxd_state import Box, ShardSpec, get_shard_spec
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StateShard:
    """One box of a logical tensor, with the values of its elements.

    Attributes:
        name: name of the logical tensor, as in `ShardPiece`; "" is the parameter's own name.
        logical_shape: shape of the whole logical tensor.
        box: the elements that this rank owns.
        tensor: their values, of the box's shape; shares memory with the optimizer.
        copies: number of ranks whose parameter holds these elements, as in `ShardPiece`.
    """

    name: str
    logical_shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    copies: int = 1


def shards_of_range(parameter: Tensor, start: int, stop: int, flat: Tensor) -> tuple[StateShard, ...]:
    """Return elements `start:stop`, in C order, of a parameter as boxes of logical tensors, without padding.

    Args:
        parameter: the parameter, with its `ShardSpec` if it has one.
        start: first element.
        stop: one past the last element.
        flat: values of these elements, 1-d; the shards are views of it.
    """
    spec = get_shard_spec(parameter) or ShardSpec.whole(parameter.shape)
    shards = []
    for block in boxes_of_flat_range(spec.local_shape, start, stop):
        values, flat = flat[: block.numel].view(block.shape), flat[block.numel :]
        for piece in spec.pieces:
            common = _intersect(block, piece.local)
            if common is not None:
                inner = Box(_minus(common.offset, block.offset), common.shape)
                into_piece = _minus(common.offset, piece.local.offset)
                offset = tuple(a + b for a, b in zip(piece.logical.offset, into_piece, strict=True))
                box, tensor = Box(offset, common.shape), values[inner.slices]
                shards.append(StateShard(piece.name, piece.logical_shape, box, tensor, piece.copies))
    return tuple(shards)


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
