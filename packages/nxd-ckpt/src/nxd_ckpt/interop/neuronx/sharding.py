"""Describes how the tensors of tensor-parallel (and expert-parallel) ranks form the tensors of the whole model.

Files are in `reading.py` and `writing.py`.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.neuronx.rank_files import Rank
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE


@dataclass(frozen=True)
class Split:
    """Even shards along one dimension; a tensor's name stays the same.

    Args:
        dim: dimension split over the tensor-parallel ranks; None: each rank holds the whole tensor.
        stride: number of matrices fused along `dim`. The whole dimension is split into `stride * tp` chunks, and a
            rank holds every tp-th one: 2 for gate and up, 3 for a fused QKV with as many K and V as Q heads.
        global_size: size of `dim` in the whole tensor, if ranks hold padding at its end, as for a vocabulary.
        expert_dim: dimension split over the expert-parallel ranks.

    Raises:
        ValueError: an argument is not an integer, or too small.
    """

    dim: int | None
    stride: int = 1
    global_size: int | None = None
    expert_dim: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("dim", 0), ("stride", 1), ("global_size", 0), ("expert_dim", 0)):
            value = getattr(self, name)
            may_be_none = name != "stride"
            if not (value is None and may_be_none) and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r} of a Split is not an integer of at least {least}")


@dataclass(frozen=True)
class Piece:
    """The box of `shape` at `local_offsets` of a rank's tensor is the box at `offsets` of the whole tensor `name`."""

    name: str
    local_offsets: Sequence[int]
    shape: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True)
class Pieces:
    """Any layout, described box by box: fused tensors of different sizes, repeated KV heads, permuted heads.

    Args:
        local_shape: shape of each rank's tensor; elements in no piece are padding.
        global_shapes: shapes of the whole tensors that it is made of, by name.
        by_tp_rank: the pieces of each tensor-parallel rank.
    """

    local_shape: Sequence[int]
    global_shapes: Mapping[str, Sequence[int]]
    by_tp_rank: Sequence[Sequence[Piece]]


Sharding = Split | Pieces

# Hugging Face names, with gate and up fused as in the library's Llama examples.
LLAMA: Mapping[str, Split] = {
    "*embed_tokens.weight": Split(0),
    "*lm_head.weight": Split(0),
    "*.q_proj.weight": Split(0),
    "*.k_proj.weight": Split(0),
    "*.v_proj.weight": Split(0),
    "*.o_proj.weight": Split(1),
    "*.gate_proj.weight": Split(0),
    "*.up_proj.weight": Split(0),
    "*.gate_up_proj.weight": Split(0, stride=2),
    "*.down_proj.weight": Split(1),
}

_EVERYWHERE = Split(None)


@dataclass(frozen=True, slots=True)
class Degrees:
    """The tensor and expert parallel sizes, and one rank in them."""

    tp_size: int
    tp_rank: int
    ep_size: int = 1
    ep_rank: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a rank's tensor and its position in the whole tensor."""

    name: str
    global_shape: tuple[int, ...]
    local: Box
    offsets: tuple[int, ...]


def sharding_of(name: str, sharding: Mapping[str, Sharding]) -> Sharding:
    """Return the entry for this name, else that of the first matching pattern, else "equal on all ranks"."""
    if name in sharding:
        return sharding[name]
    return next((rule for pattern, rule in sharding.items() if fnmatch.fnmatchcase(name, pattern)), _EVERYWHERE)


def placements(name: str, local_shape: tuple[int, ...], rule: Sharding, at: Degrees) -> list[Placement]:
    """Return the positions of one rank's tensor in whole tensors; padding has none.

    Raises:
        ValueError: the rule does not match the tensor or the number of ranks.
    """
    if isinstance(rule, Pieces):
        return _place_pieces(name, local_shape, rule, at)
    global_shape, origin = list(local_shape), [0] * len(local_shape)
    if rule.expert_dim is not None:
        _check_dim(name, local_shape, rule.expert_dim)
        global_shape[rule.expert_dim] *= at.ep_size
        origin[rule.expert_dim] = at.ep_rank * local_shape[rule.expert_dim]
    if rule.dim is None:
        return [Placement(name, tuple(global_shape), Box.whole(local_shape), tuple(origin))]
    return _place_split(name, local_shape, rule, at, (global_shape, origin))


def local_shape_of(name: str, global_shape: tuple[int, ...], rule: Sharding, at: Degrees) -> tuple[int, ...]:
    """Return the shape of a rank's tensor, including padding: the inverse of `placements`.

    Raises:
        ValueError: the tensor cannot be sharded by this rule.
    """
    if isinstance(rule, Pieces):
        return tuple(rule.local_shape)
    shape = list(global_shape)
    for dim, count in ((rule.dim, at.tp_size * rule.stride), (rule.expert_dim, at.ep_size)):
        if dim is not None:
            _check_dim(name, global_shape, dim)
            padded = dim == rule.dim and rule.global_size is not None
            if shape[dim] % count and not padded:
                raise ValueError(
                    f"{name!r} {list(global_shape)}: {count} ranks or chunks do not divide dimension {dim}; "
                    "use another degree, or pass Split(global_size=) to pad"
                )
            shape[dim] = -(-shape[dim] // count) * (rule.stride if dim == rule.dim else 1)
    return tuple(shape)


def _place_split(
    name: str, local_shape: tuple[int, ...], rule: Split, at: Degrees, whole: tuple[list[int], list[int]]
) -> list[Placement]:
    global_shape, origin = whole
    dim = _check_dim(name, local_shape, rule.dim)
    size, rest = divmod(local_shape[dim], rule.stride)
    padded = local_shape[dim] * at.tp_size
    global_size = padded if rule.global_size is None else rule.global_size
    if rest or global_size > padded or (rule.global_size is not None and rule.stride > 1):
        raise ValueError(f"{name!r}: a rank's {list(local_shape)} does not fit {rule} over {at.tp_size} ranks")
    global_shape[dim] = global_size
    found = []
    for chunk in range(rule.stride):
        begin = (chunk * at.tp_size + at.tp_rank) * size
        count = min(size, max(0, global_size - begin))
        local_offsets, shape, offsets = [0] * len(local_shape), list(local_shape), list(origin)
        local_offsets[dim], shape[dim], offsets[dim] = chunk * size, count, min(begin, global_size)
        found.append(Placement(name, tuple(global_shape), Box(tuple(local_offsets), tuple(shape)), tuple(offsets)))
    return found


def _place_pieces(name: str, local_shape: tuple[int, ...], rule: Pieces, at: Degrees) -> list[Placement]:
    if tuple(rule.local_shape) != local_shape or len(rule.by_tp_rank) != at.tp_size:
        raise ValueError(
            f"{name!r}: Pieces are for {len(rule.by_tp_rank)} ranks with {list(rule.local_shape)} each, "
            f"found {at.tp_size} with {list(local_shape)}"
        )
    found = []
    for piece in rule.by_tp_rank[at.tp_rank]:
        local = Box(tuple(piece.local_offsets), tuple(piece.shape))
        global_shape = tuple(rule.global_shapes.get(piece.name, ()))
        fits = piece.name in rule.global_shapes and Box(tuple(piece.offsets), local.shape).fits_in(global_shape)
        if not (fits and local.fits_in(local_shape)):
            raise ValueError(f"{name!r}: {piece} lies outside of {list(local_shape)} or {dict(rule.global_shapes)}")
        found.append(Placement(piece.name, global_shape, local, tuple(piece.offsets)))
    return found


def _check_dim(name: str, shape: tuple[int, ...], dim: int | None) -> int:
    if dim is None or not 0 <= dim < len(shape):
        raise ValueError(f"{name!r} {list(shape)} has no dimension {dim}; use 0 to {len(shape) - 1}")
    return dim


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as one rank saved it."""

    name: str
    rank: Rank
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class SavedBox:
    """A box of a whole tensor, as one rank saved it."""

    rank: Rank
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    box: Box


def check_storable(what: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that a checkpoint cannot hold.

    Raises:
        CheckpointError: the tensor cannot be stored; names it with `what`.
    """
    if tensor.dtype not in CODE_OF_DTYPE or tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(f"{what} is {tensor.dtype}, {tensor.layout} on {tensor.device}, and cannot be stored")


def place(
    tensors: Iterable[LocalTensor], sharding: Mapping[str, Sharding], degrees: Degrees
) -> dict[str, list[SavedBox]]:
    """Return the parts of each whole tensor, as views of the ranks' tensors.

    Raises:
        ValueError: the sharding does not match a tensor.
    """
    parts: dict[str, list[SavedBox]] = {}
    for local in tensors:
        for placement in placements_of(local.name, tuple(local.tensor.shape), local.rank, sharding, degrees):
            box = Box(placement.offsets, placement.local.shape)
            part = SavedBox(local.rank, local.tensor[placement.local.slices], placement.global_shape, box)
            parts.setdefault(placement.name, []).append(part)
    return parts


def placements_of(
    name: str, shape: tuple[int, ...], rank: Rank, sharding: Mapping[str, Sharding], degrees: Degrees
) -> list[Placement]:
    """Return the positions of one rank's tensor in whole tensors."""
    at = dataclasses.replace(degrees, tp_rank=rank.tp, ep_rank=rank.ep)
    return placements(name, shape, sharding_of(name, sharding), at)
