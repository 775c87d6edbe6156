"""Parameters of experts: which of them a rank has, and what optimizers and checkpoints are to know of them."""

from dataclasses import replace

import torch
from nxd_state import Box, ShardSpec, active_group, get_shard_spec, set_shard_spec
from nxd_state.shard_spec import DOCUMENTED_ATTRIBUTES
from torch import Tensor, nn


def shard_experts(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's experts of a parameter that has all, with its shard metadata and the mark of an expert's.

    Args:
        parameter: `[experts, ...]`, each expert whole or split over the tensor-parallel ranks.

    Raises:
        ValueError: the expert-parallel ranks do not divide the experts.
    """
    whole = ShardSpec.whole(parameter.shape, copies=active_group("etp").size)
    spec = spec_of_own_experts(get_shard_spec(parameter) or whole)
    first = active_group("ep").rank * spec.local_shape[0]
    part = parameter.detach()[first : first + spec.local_shape[0]].clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for attribute in DOCUMENTED_ATTRIBUTES:
        if hasattr(parameter, attribute):
            setattr(made, attribute, getattr(parameter, attribute))
    set_shard_spec(made, spec)
    mark_expert_parameter(made)
    return made


def check_expert_tensor_parallel_size() -> None:
    """Raise a ValueError where experts are split over some of the tensor-parallel ranks: sums are over all or none."""
    tp, etp = active_group("tp").size, active_group("etp").size
    if etp not in (1, tp):
        raise ValueError(
            f"expert_tensor_parallel_size={etp} with tensor_parallel_size={tp}: an expert is split over all "
            f"tensor-parallel ranks or over none; use {tp} or 1"
        )


def mark_expert_parameter(parameter: Tensor) -> None:
    """Say of a parameter that it is an expert's: its replicas are the ranks that have the same experts."""
    parameter.expert_model_parallel = True  # type: ignore[attr-defined]


def spec_of_own_experts(spec: ShardSpec) -> ShardSpec:
    """What this expert-parallel rank holds of a parameter `[experts, ...]`.

    Args:
        spec: of the parameter with all experts, over the ranks that split each.

    Raises:
        ValueError: the expert-parallel ranks do not divide the experts.
    """
    group, experts = active_group("ep"), spec.local_shape[0]
    if experts % group.size:
        raise ValueError(
            f"{experts} experts of a parameter {spec.local_shape} cannot be split over {group.size} ranks; "
            f"use an expert-parallel degree that divides {experts}"
        )
    number = experts // group.size
    first = group.rank * number
    pieces = []
    for piece in spec.pieces:
        begin = max(piece.local.offset[0], first)
        end = min(piece.local.slices[0].stop, first + number)
        if begin < end:
            shape = (end - begin, *piece.local.shape[1:])
            logical = piece.logical.offset[0] + begin - piece.local.offset[0]
            local_box = Box((begin - first, *piece.local.offset[1:]), shape)
            logical_box = Box((logical, *piece.logical.offset[1:]), shape)
            pieces.append(replace(piece, local=local_box, logical=logical_box))
    return ShardSpec((number, *spec.local_shape[1:]), tuple(pieces), axis="ep")
