"""Maps the tensors of ranks to parts of whole tensors."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.dtypes import CODE_OF_DTYPE
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.neuronx.rank_files import Rank
from nxd_ckpt.interop.neuronx.sharding import Degrees, Placement, Sharding, placements, sharding_of


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as one rank saved it."""

    name: str
    rank: Rank
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a whole tensor, as one rank saved it."""

    rank: Rank
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    box: Box


def check_storable(what: str, tensor: torch.Tensor) -> None:
    """Refuses tensors that a checkpoint cannot hold.

    Raises:
        CheckpointError: the tensor cannot be stored; names it with `what`.
    """
    if tensor.dtype not in CODE_OF_DTYPE or tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(f"{what} is {tensor.dtype}, {tensor.layout} on {tensor.device}, and cannot be stored")


def place(tensors: Iterable[LocalTensor], sharding: Mapping[str, Sharding], degrees: Degrees) -> dict[str, list[Part]]:
    """Return the parts of each whole tensor, as views of the ranks' tensors.

    Raises:
        ValueError: the sharding does not match a tensor.
    """
    parts: dict[str, list[Part]] = {}
    for local in tensors:
        for placement in placements_of(local.name, tuple(local.tensor.shape), local.rank, sharding, degrees):
            box = Box(placement.offsets, placement.local.shape)
            part = Part(local.rank, local.tensor[placement.local.slices()], placement.global_shape, box)
            parts.setdefault(placement.name, []).append(part)
    return parts


def placements_of(
    name: str, shape: tuple[int, ...], rank: Rank, sharding: Mapping[str, Sharding], degrees: Degrees
) -> list[Placement]:
    """Return the positions of one rank's tensor in whole tensors."""
    at = dataclasses.replace(degrees, tp_rank=rank.tp, ep_rank=rank.ep)
    return placements(name, shape, sharding_of(name, sharding), at)
