"""Parameters of experts: which of them a rank has, and what optimizers and checkpoints are to know of them."""

import torch
from nxd_state import Box, Group, ShardPiece, ShardSpec, active_group, get_shard_spec, set_shard_spec
from nxd_state.shard_spec import DOCUMENTED_ATTRIBUTES
from torch import Tensor, nn


def shard_experts(parameter: nn.Parameter, group: Group | None = None) -> nn.Parameter:
    """This rank's experts of a parameter that has all, with its shard metadata and the mark of an expert's.

    Args:
        parameter: `[experts, ...]`, each expert whole or split over the tensor-parallel ranks.
        group: that splits the experts; the expert-parallel one if None.

    Raises:
        ValueError: the group does not divide the experts.
    """
    group = group or active_group("ep")
    experts = parameter.shape[0]
    if experts % group.size:
        raise ValueError(
            f"{experts} experts of a parameter {tuple(parameter.shape)} cannot be split over {group.size} ranks; "
            f"use an expert-parallel degree that divides {experts}"
        )
    each = experts // group.size
    first = group.rank * each
    part = parameter.detach()[first : first + each].clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for attribute in DOCUMENTED_ATTRIBUTES:
        if hasattr(parameter, attribute):
            setattr(made, attribute, getattr(parameter, attribute))
    set_shard_spec(made, _rows_of(get_shard_spec(parameter) or _whole(parameter), first, each))
    mark_expert_parameter(made)
    return made


def mark_expert_parameter(parameter: Tensor) -> None:
    """Say of a parameter that it is an expert's: its replicas are the ranks that have the same experts."""
    parameter.expert_model_parallel = True  # type: ignore[attr-defined]


def _whole(parameter: Tensor) -> ShardSpec:
    shape = tuple(parameter.shape)
    box = Box((0,) * len(shape), shape)
    return ShardSpec(shape, (ShardPiece(box, box, shape, copies=active_group("etp").size),))


def _rows_of(spec: ShardSpec, first: int, number: int) -> ShardSpec:
    """The spec of that many rows of dim 0."""
    pieces = []
    for piece in spec.pieces:
        begin = max(piece.local.offset[0], first)
        end = min(piece.local.slices[0].stop, first + number)
        if begin < end:
            shape = (end - begin, *piece.local.shape[1:])
            logical = piece.logical.offset[0] + begin - piece.local.offset[0]
            pieces.append(
                ShardPiece(
                    Box((begin - first, *piece.local.offset[1:]), shape),
                    Box((logical, *piece.logical.offset[1:]), shape),
                    piece.logical_shape,
                    piece.name,
                    piece.copies,
                )
            )
    return ShardSpec((number, *spec.local_shape[1:]), tuple(pieces), axis="ep")
