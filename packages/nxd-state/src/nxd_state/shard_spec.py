"""Shard metadata: how the part of a parameter on this rank maps to whole, *logical* tensors.

The logical tensors have the names and shapes of the unsharded model, and are the truth: optimizers count and
checkpoints store them, whatever the layout. A parameter without a `ShardSpec` is whole on every rank.

A spec is a list of pieces, each a box of the local tensor and the box of a logical tensor it holds. That covers
plain, strided and fused shards (several logical tensors in one parameter), rows held by several ranks
(`copies`), and padding (local elements in no piece).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from nxd_state.parameter_marks import copy_marks, get_partition

_SPEC_ATTRIBUTE = "shard_spec"


@dataclass(frozen=True)
class Box:
    """A box of a tensor: where it begins and how long it is along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index: `tensor[box.slices]` is a view of it."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(self.shape) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= size
            for start, length, size in zip(self.offset, self.shape, shape, strict=True)
        )

    def overlaps(self, other: "Box") -> bool:
        """Whether the two boxes share an element."""
        return all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )


@dataclass(frozen=True)
class ShardPiece:
    """One box of a local tensor and the box of a logical tensor behind it.

    Attributes:
        local: box of the parameter on this rank.
        logical: box of the logical tensor; same shape as `local`.
        logical_shape: shape of the whole logical tensor.
        name: "" where the logical tensor has the parameter's own name; otherwise its name relative to the parent
            of the module that owns the parameter, such as "q_proj.weight" for a fused `attention.qkv_proj`.
        copies: number of ranks of the axis that hold this same box; "ep" counts those of "etp" as well.
    """

    local: Box
    logical: Box
    logical_shape: tuple[int, ...]
    name: str = ""
    copies: int = 1


@dataclass(frozen=True)
class ShardSpec:
    """The contents of one rank's part of a parameter.

    Attributes:
        local_shape: shape of the parameter on this rank.
        pieces: the boxes that hold something; elements outside of them are padding.
        axis: the mesh axis along which the ranks hold different pieces: "tp", or "ep", which for an expert means those
            that split the experts and those that split each of them ("etp").
    """

    local_shape: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]
    axis: str = "tp"

    @property
    def has_padding(self) -> bool:
        """Whether some element of the local tensor is in no piece."""
        return sum(piece.local.numel for piece in self.pieces) < prod(self.local_shape)

    @property
    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the logical tensors of which this rank holds a part, by `ShardPiece.name`."""
        return {piece.name: piece.logical_shape for piece in self.pieces}

    @classmethod
    def whole(cls, shape: Sequence[int], *, name: str = "", copies: int = 1, axis: str = "tp") -> "ShardSpec":
        """The spec of a tensor that every rank holds whole."""
        box = Box((0,) * len(shape), tuple(shape))
        return cls(box.shape, (ShardPiece(box, box, box.shape, name, copies),), axis)

    @torch.no_grad()
    def copy_from_logical(self, logical: Tensor | Mapping[str, Tensor], local: Tensor) -> None:
        """Fill `local` with this rank's boxes of the logical tensors; padding keeps its values.

        Values are converted to the dtype of `local` and moved to its device.

        Args:
            logical: the logical tensor, or logical tensors by `ShardPiece.name`.
            local: tensor of `local_shape`.
        """
        for piece in self.pieces:
            whole = logical if isinstance(logical, Tensor) else logical[piece.name]
            local[piece.local.slices].copy_(whole[piece.logical.slices])

    @torch.no_grad()
    def copy_to_logical(self, local: Tensor, logical: Tensor | Mapping[str, Tensor]) -> None:
        """Copy this rank's boxes of `local` into the logical tensors; the other ranks' elements keep their values.

        Args:
            local: tensor of `local_shape`.
            logical: the logical tensor, or logical tensors by `ShardPiece.name`.
        """
        for piece in self.pieces:
            whole = logical if isinstance(logical, Tensor) else logical[piece.name]
            whole[piece.logical.slices].copy_(local[piece.local.slices])

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if piece.local.shape != piece.logical.shape:
                raise ValueError(f"{piece}: the local and the logical box must have the same shape")
            if not piece.local.fits(self.local_shape) or not piece.logical.fits(piece.logical_shape):
                raise ValueError(f"{piece} does not fit local shape {self.local_shape}, logical {piece.logical_shape}")
        for index, piece in enumerate(self.pieces):
            if any(piece.local.overlaps(other.local) for other in self.pieces[:index]):
                raise ValueError(f"{piece} overlaps another piece of the same parameter")


def shard_along(
    logical_shape: Sequence[int],
    dim: int,
    *,
    rank: int,
    size: int,
    stride: int = 1,
    padded_length: int | None = None,
    copies: int = 1,
    name: str = "",
    axis: str = "tp",
) -> ShardSpec:
    """The spec of equal shards along one dim.

    Args:
        logical_shape: shape of the whole tensor.
        dim: the dim that is cut.
        rank: index of the shard.
        size: number of shards.
        stride: number of matrices fused along `dim`; each is cut on its own, so a shard holds chunks `[rank::size]`
            of `stride * size` chunks.
        padded_length: length of `dim` after padding at the end of each fused matrix; the logical length if None.
        copies: ranks that hold each shard; see `ShardPiece.copies`.
        name: see `ShardPiece.name`.
        axis: see `ShardSpec.axis`.

    Raises:
        ValueError: no such dim or rank, or the number of chunks does not divide the (padded) length, or `stride` the
            logical one.
    """
    dim = checked_dim(dim, logical_shape)
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside the {size} shards; use 0..{size - 1}")
    length = logical_shape[dim] if padded_length is None else padded_length
    if length < logical_shape[dim]:
        raise ValueError(
            f"padded_length={length} is shorter than dim {dim} of shape {tuple(logical_shape)}; "
            f"use {logical_shape[dim]} or more"
        )
    matrix_length, odd = divmod(logical_shape[dim], stride)
    if odd:
        raise ValueError(
            f"dim {dim} of shape {tuple(logical_shape)} cannot be {stride} fused matrices of equal length; "
            f"use a length that {stride} divides"
        )
    if length % (size * stride):
        parts = f"{size} shards" if stride == 1 else f"{size} shards of {stride} fused matrices"
        raise ValueError(
            f"{parts} do not divide dim {dim} of shape {tuple(logical_shape)} (length {length}); "
            f"pad it to {-(-length // (size * stride)) * size * stride} or use fewer ranks"
        )
    chunk = length // (size * stride)

    def box(start: int, span: int) -> Box:
        offset, shape = [0] * len(logical_shape), list(logical_shape)
        offset[dim], shape[dim] = start, span
        return Box(tuple(offset), tuple(shape))

    pieces = []
    held = min(chunk, matrix_length - rank * chunk)  # of each matrix; the rest is padding
    for matrix in range(stride if held > 0 else 0):
        local, logical = box(matrix * chunk, held), box(matrix * matrix_length + rank * chunk, held)
        pieces.append(ShardPiece(local, logical, tuple(logical_shape), name, copies))
    return ShardSpec(box(0, chunk * stride).shape, tuple(pieces), axis)


def fuse_along(specs: Sequence[ShardSpec], dim: int) -> ShardSpec:
    """The spec of one parameter that holds several, concatenated along `dim` on each rank.

    Raises:
        ValueError: there are no specs, or they differ in axis or in a local length other than that of `dim`.
    """
    if not specs:
        raise ValueError("no specs to fuse; pass at least one")
    dim = checked_dim(dim, specs[0].local_shape)
    start, pieces = 0, []
    for spec in specs:
        rest = [list(s.local_shape[:dim] + s.local_shape[dim + 1 :]) for s in (specs[0], spec)]
        if spec.axis != specs[0].axis or rest[0] != rest[1]:
            raise ValueError(
                f"{spec.local_shape} over {spec.axis} cannot be fused along dim {dim} with "
                f"{specs[0].local_shape} over {specs[0].axis}"
            )
        for piece in spec.pieces:
            offset = list(piece.local.offset)
            offset[dim] += start
            pieces.append(replace(piece, local=Box(tuple(offset), piece.local.shape)))
        start += spec.local_shape[dim]
    shape = list(specs[0].local_shape)
    shape[dim] = start
    return ShardSpec(tuple(shape), tuple(pieces), specs[0].axis)


def set_shard_spec(parameter: Tensor, spec: ShardSpec) -> None:
    """Attach `spec` to `parameter`.

    Raises:
        ValueError: the spec is for another local shape.
    """
    if tuple(parameter.shape) != spec.local_shape:
        raise ValueError(f"spec of local shape {spec.local_shape} given for a tensor of {tuple(parameter.shape)}")
    setattr(parameter, _SPEC_ATTRIBUTE, spec)


def get_shard_spec(parameter: Tensor) -> ShardSpec | None:
    """The spec attached to `parameter`; None if it is whole on every rank."""
    spec: ShardSpec | None = getattr(parameter, _SPEC_ATTRIBUTE, None)
    return spec


def is_padded_on_some_rank(parameter: Tensor) -> bool:
    """Whether this parameter's part on this rank or on another has padding; the same on every rank.

    A graph that is to be the same on every rank depends on this, not on `has_padding`. False for a parameter without
    shard spec, or without the attributes of `set_partition_attributes`.
    """
    spec, partition = get_shard_spec(parameter), get_partition(parameter)
    if spec is None or partition is None:
        return False
    # A rank without elements of some logical tensor has padding in their place, and so returns True as well.
    held = {piece.name: prod(piece.logical_shape) * piece.copies for piece in spec.pieces}
    return prod(spec.local_shape) * partition.num_partitions > sum(held.values())


def copy_parameter_attributes(source: Tensor, target: Tensor) -> None:
    """Copy spec and marks to a parameter that replaces another of its shape."""
    spec = get_shard_spec(source)
    if spec is not None:
        set_shard_spec(target, spec)
    copy_marks(source, target)


def check_shard_specs(specs: Sequence[ShardSpec]) -> None:
    """Check the specs of one parameter on all ranks of its axis against each other.

    Raises:
        ValueError: an element of a logical tensor is held by no rank, or by another number than `copies` says, or
            the ranks disagree about a logical tensor's shape.
    """
    pieces_by_name: dict[str, list[ShardPiece]] = {}
    for spec in specs:
        for piece in spec.pieces:
            pieces_by_name.setdefault(piece.name, []).append(piece)
    for name, pieces in pieces_by_name.items():
        shapes = {piece.logical_shape for piece in pieces}
        if len(shapes) > 1:
            raise ValueError(f"logical tensor {name!r} has several shapes: {sorted(shapes)}")
        _check_cover(name, pieces)


def _check_cover(name: str, pieces: Sequence[ShardPiece]) -> None:
    """Count the holders of every cell of the grid that the boxes' edges cut the logical tensor into."""
    shape = pieces[0].logical_shape
    edges = []
    for dim, size in enumerate(shape):
        boxes = [piece.logical.slices[dim] for piece in pieces]
        edges.append(sorted({0, size, *(box.start for box in boxes), *(box.stop for box in boxes)}))
    holders = torch.zeros([len(cuts) - 1 for cuts in edges], dtype=torch.int64)
    promised = torch.zeros_like(holders)
    for piece in pieces:
        cells = tuple(
            slice(cuts.index(box.start), cuts.index(box.stop))
            for cuts, box in zip(edges, piece.logical.slices, strict=True)
        )
        holders[cells] += 1
        promised[cells] = piece.copies
    wrong = (holders != promised) | (holders == 0)
    if wrong.any():
        cell = tuple(wrong.nonzero()[0].tolist())
        element = tuple(cuts[index] for cuts, index in zip(edges, cell, strict=True))
        raise ValueError(
            f"element {element} of logical tensor {name!r} {shape} is held by {int(holders[cell])} ranks, "
            f"but its spec says {int(promised[cell])}; give each rank its own part, and set "
            "copies to the number of ranks that hold it"
        )


def checked_dim(dim: int, shape: Sequence[int]) -> int:
    """A dim of a tensor of that shape, counted from the front.

    Raises:
        ValueError: there is no such dim.
    """
    if not -len(shape) <= dim < len(shape):
        use = f"use {-len(shape)}..{len(shape) - 1}" if shape else "reshape it to (1,) first"
        raise ValueError(f"dim={dim} is outside a tensor of shape {tuple(shape)}; {use}")
    return dim % len(shape)
