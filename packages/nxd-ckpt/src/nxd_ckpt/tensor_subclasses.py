"""Tensor subclasses made of inner tensors, such as 8-bit optimizer states, as boxes of global inner tensors.

The inner tensors are those of `__tensor_flatten__`. If such a tensor is split by rows in a DTensor, slicing it shows
how each inner tensor is split: codes and block scales shrink with the rows, a lookup table does not.
"""

from fractions import Fraction
from typing import Any

import torch

from nxd_ckpt.distributed_tensors import is_dtensor, local_box, local_tensor
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor


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
