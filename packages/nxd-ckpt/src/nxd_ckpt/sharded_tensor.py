"""The caller's description of a tensor: the boxes of a global tensor that this rank holds.

Only descriptions and checks; `plan.py` decides which rank writes what, and `tensor_bytes.py` moves the bytes.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.manifest import is_possible_shape
from nxd_ckpt.manifest_text import MAX_DIMS
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE


@dataclass(frozen=True, eq=False)
class Shard:
    """One box of a global tensor.

    Args:
        tensor: the elements of the box; a view of the caller's memory, of any strides and on any device.
        offsets: the box's first index in the global tensor, one per dimension.
    """

    tensor: torch.Tensor
    offsets: Sequence[int]

    @property
    def box(self) -> Box:
        """The position of this shard in the global tensor."""
        return Box(tuple(map(operator.index, self.offsets)), tuple(self.tensor.shape))


class ShardedTensor:
    """The part of one global tensor that this rank holds, in any number of boxes.

    Args:
        global_shape: shape of the logical (unsharded, unpadded) tensor.
        shards: the boxes that this rank holds, possibly none.
        dtype: needed only when `shards` is empty.

    Raises:
        ValueError: a shard is outside of `global_shape`, or dtypes differ or cannot be stored.
        TypeError: sizes or offsets are not integers.
    """

    def __init__(
        self, global_shape: Sequence[int], shards: Sequence[Shard] = (), dtype: torch.dtype | None = None
    ) -> None:
        self.global_shape = tuple(map(operator.index, global_shape))
        if len(self.global_shape) > MAX_DIMS or not all(0 <= size < 2**63 for size in self.global_shape):
            raise ValueError(f"global_shape={list(global_shape)} is not a shape of at most {MAX_DIMS} dimensions")
        self.shards = tuple(shards)
        for shard in self.shards:
            if not (isinstance(shard, Shard) and isinstance(shard.tensor, torch.Tensor)):
                raise ValueError(f"a shard is a {type(shard).__name__}; pass Shard(tensor, offsets), with a tensor")
        dtypes = {shard.tensor.dtype for shard in self.shards} | ({dtype} if dtype is not None else set())
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes))) or "no shard and no dtype"
            raise ValueError(f"a ShardedTensor needs exactly one dtype, got {found}; pass dtype= when shards is empty")
        self.dtype: torch.dtype = dtypes.pop()
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(f"{self.dtype} cannot be stored; use one of {', '.join(map(str, CODE_OF_DTYPE))}")
        if not is_possible_shape(self.global_shape, self.dtype.itemsize):
            raise ValueError(f"global_shape={list(self.global_shape)} has more bytes than 63 bits can count; check it")
        for shard in self.shards:
            _check_shard(shard, self.global_shape)

    def __repr__(self) -> str:
        boxes = ", ".join(str(shard.box) for shard in self.shards)
        return f"ShardedTensor(global_shape={list(self.global_shape)}, dtype={self.dtype}, boxes=[{boxes}])"


def as_sharded(name: str, value: "ShardedTensor | torch.Tensor") -> ShardedTensor:
    """Wrap a plain tensor as a whole tensor that is replicated on all ranks."""
    if isinstance(value, ShardedTensor):
        return value
    if isinstance(value, torch.Tensor):
        return ShardedTensor(value.shape, [Shard(value, (0,) * value.ndim)])
    raise ValueError(f"{name!r} is a {type(value).__name__}; expected a ShardedTensor or a torch.Tensor")


def as_sharded_state(state: "Mapping[str, ShardedTensor | torch.Tensor]") -> dict[str, ShardedTensor]:
    """Turn every value into a ShardedTensor.

    Raises:
        ValueError: lists every entry that cannot be used.
    """
    sharded: dict[str, ShardedTensor] = {}
    problems: list[str] = []
    for name, value in state.items():
        try:
            sharded[name] = as_sharded(name, value)
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise ValueError("unusable tensors:\n  " + "\n  ".join(problems))
    return sharded


def tensors_of(state: Mapping[str, ShardedTensor]) -> Callable[[str, Box], torch.Tensor]:
    """Return a function that finds this rank's elements of a name and box, as a view."""

    def tensor_of(name: str, box: Box) -> torch.Tensor:
        shard = next(shard for shard in state[name].shards if shard.box.contains(box))
        return shard.tensor[box.relative_to(shard.box).slices]

    return tensor_of


def _check_shard(shard: Shard, global_shape: tuple[int, ...]) -> None:
    tensor = shard.tensor
    if len(shard.offsets) != tensor.ndim or not shard.box.fits_in(global_shape):
        raise ValueError(
            f"shard with offsets {list(shard.offsets)} and shape {list(tensor.shape)} does not lie inside the "
            f"global shape {list(global_shape)}"
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ValueError(f"a shard must be a dense tensor with data, got device {tensor.device}, {tensor.layout}")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(
            f"a shard must be a plain tensor, got a {type(tensor).__name__}; pass its local tensor and offsets"
        )
