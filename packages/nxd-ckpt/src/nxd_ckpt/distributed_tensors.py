"""Converts torch's DTensors and ShardedTensors, and tensors made of inner tensors, to boxes of global tensors.

Tensor subclasses, such as 8-bit optimizer states, are stored as the inner tensors of `__tensor_flatten__`. If one is
split by rows in a DTensor, slicing it shows how each inner tensor is split: codes and block scales shrink with the
rows, a lookup table does not.
"""

import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def as_boxes(value: Any) -> Any:
    """Return a DTensor or torch's ShardedTensor as a ShardedTensor of ours that shares its memory; others unchanged.

    Raises:
        ValueError: the tensor is a sum over ranks, or its shards are not boxes.
    """
    if is_dtensor(value):
        return _boxes_of_dtensor(value)
    if is_sharded_tensor_of_torch(value):
        shards = [Shard(it.tensor.detach(), tuple(it.metadata.shard_offsets)) for it in value.local_shards()]
        return ShardedTensor(tuple(value.size()), shards, value.dtype)
    return value


def is_sharded_tensor_of_torch(value: Any) -> bool:
    """Whether a value is a ShardedTensor of `torch.distributed`, which is older than DTensor."""
    return hasattr(value, "local_shards") and hasattr(value, "sharding_spec")


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether a value is a DTensor. Does not import its module, which is slow: without it there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_box(tensor: "DTensor") -> Box | None:
    """Return the box of a DTensor that this rank holds; None if the rank is not in the tensor's mesh.

    Raises:
        ValueError: the tensor is a sum over ranks, or this rank's elements are not a box.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    ranges = [(0, size) for size in tensor.shape]
    for axis in _splitting_order(tensor.placements, tensor.device_mesh.shape):
        dim = _dim_of(tensor.placements[axis]) % tensor.ndim
        begin, end = ranges[dim]
        length = -(-(end - begin) // tensor.device_mesh.shape[axis])  # as torch.chunk cuts
        first = min(end, begin + coordinate[axis] * length)
        ranges[dim] = (first, min(end, first + length))
    shape = tuple(end - begin for begin, end in ranges)
    found = tuple(local_tensor(tensor).shape)
    if found != shape:
        raise ValueError(
            f"a DTensor {list(tensor.shape)} with {tensor.placements} has a local tensor {list(found)} where "
            f"{list(shape)} is expected; pass a ShardedTensor that says which box it is"
        )
    return Box(tuple(begin for begin, _ in ranges), shape)


def local_tensor(tensor: "DTensor") -> torch.Tensor:
    """Return this rank's local tensor of a DTensor itself, not a view."""
    with torch.no_grad():
        return tensor.to_local()


def _boxes_of_dtensor(tensor: "DTensor") -> ShardedTensor:
    box, local = local_box(tensor), local_tensor(tensor).detach()
    if box is None or (tensor.numel() and not local.numel()):
        return ShardedTensor(tensor.shape, (), tensor.dtype)
    return ShardedTensor(tensor.shape, [Shard(local, box.offsets)], tensor.dtype)


def _splitting_order(placements: "Sequence[Placement]", mesh_shape: Sequence[int]) -> list[int]:
    """Return the mesh axes that shard, in the order in which they split.

    This is the order of the mesh, except for placements with a `split_factor`, as FSDP2 makes them over tensor
    parallelism: these split after later axes have split the dimension into that many parts.
    """
    order: list[int] = []
    waiting: list[tuple[int, int, int]] = []  # axis, dim, parts into which others still have to split
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"a DTensor with {tuple(placements)} is a sum over ranks; redistribute it to Replicate()")
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", 1)
        if factor > 1:
            waiting.append((axis, _dim_of(placement), factor))
            continue
        order.append(axis)
        for index, (other, dim, parts) in enumerate(waiting):
            if dim == _dim_of(placement):
                waiting[index] = (other, dim, parts // mesh_shape[axis])
        ready = [other for other, _, parts in waiting if parts <= 1]
        waiting = [it for it in waiting if it[2] > 1]
        order += reversed(ready)
    if waiting:
        raise ValueError(f"unknown sharding order of a DTensor with {tuple(placements)} on a mesh {tuple(mesh_shape)}")
    return order


def _dim_of(placement: "Placement") -> int:
    dim = getattr(placement, "dim", None)
    if not (placement.is_shard() or hasattr(placement, "split_factor")) or not isinstance(dim, int):
        raise ValueError(f"a DTensor with the placement {placement} cannot be saved; redistribute it to Shard(dim)")
    return dim


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor made of inner tensors, or a DTensor of such tensors."""
    local = local_tensor(value) if is_dtensor(value) else value
    return isinstance(local, torch.Tensor) and hasattr(type(local), "__tensor_flatten__")


def parts_of(value: Any) -> dict[str, Any]:
    """Return the inner tensors by name, as tensors or boxes that share their memory.

    Raises:
        ValueError: the tensor is split in a way in which its inner tensors cannot be split.
    """
    if not is_dtensor(value):
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    box, local = local_box(value), local_tensor(value)
    if box is None or (value.numel() and not box.num_elements):
        raise ValueError(f"this rank holds nothing of a {type(local).__name__} {list(value.shape)}; use fewer ranks")
    inner = {name: getattr(local, name) for name in local.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    if box.shape == tuple(value.shape):
        return inner
    if box.shape[1:] != tuple(value.shape[1:]):
        raise ValueError(
            f"a {type(local).__name__} {list(value.shape)} is split into {list(box.shape)}; it can only be saved whole "
            "or split along dimension 0"
        )
    cut = _cut_along_rows(local)
    return {
        name: _rows(part, box.offsets[0], box.shape[0], value.shape[0]) if name in cut else part
        for name, part in inner.items()
    }


def _cut_along_rows(tensor: torch.Tensor) -> set[str]:
    """Return the names of the inner tensors that shrink when rows are removed."""
    rows = tensor.shape[0]
    for fewer in dict.fromkeys((rows // 2, *(rows // divisor for divisor in (3, 5, 7)), 1)):
        if not 0 < fewer < rows:
            continue
        try:
            with torch.no_grad():
                sliced = tensor[:fewer]
        except (ValueError, RuntimeError, NotImplementedError):
            continue  # not at a block boundary
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return {name for name in names if getattr(sliced, name).shape != getattr(tensor, name).shape}
    raise ValueError(
        f"a {type(tensor).__name__} {list(tensor.shape)} is split over ranks and cannot be sliced along dimension 0, "
        "so it is unknown how its inner tensors are split"
    )


def _rows(part: torch.Tensor, first: int, count: int, of: int) -> ShardedTensor:
    """Return an inner tensor that grows with the rows as a box of the global one."""
    each = Fraction(part.shape[0], count)
    begin, total = first * each, of * each
    if begin.denominator != 1 or total.denominator != 1:
        raise ValueError(
            f"an inner tensor {list(part.shape)} cannot be split at rows {first} and {first + count} of {of}"
        )
    return ShardedTensor((int(total), *part.shape[1:]), [Shard(part, (int(begin), *(0,) * (part.ndim - 1)))])
