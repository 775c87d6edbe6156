"""Cutting whole tensors: replaces a parameter of a model in memory by this rank's part of it."""

from collections.abc import Sequence

import torch
from nxd_state import (
    ShardSpec,
    active_group,
    copy_parameter_attributes,
    get_shard_spec,
    set_partition_attributes,
    set_shard_spec,
)
from nxd_state import shard_along as equal_shards
from torch import Tensor, nn


@torch.no_grad()
def part_of(whole: Tensor, spec: ShardSpec) -> Tensor:
    """The part of `whole` that `spec` describes, as a copy; padding is zero. On the meta device if `whole` is."""
    part = whole.new_zeros(spec.local_shape)
    for piece in spec.pieces:
        part[piece.local.slices] = whole[piece.logical.slices]
    return part


def take_part(target: nn.Parameter, whole: Tensor) -> nn.Parameter:
    """The part of `whole` that `target` (a layer's, on the meta device) is made for, with the attributes of both."""
    spec = get_shard_spec(target)
    part = whole.detach() if spec is None else part_of(whole, spec)
    made = nn.Parameter(part, requires_grad=whole.requires_grad)
    copy_parameter_attributes(target, made)
    return made


def shard_parameter(module: nn.Module, name: str, dim: int, *, stride: int = 1) -> None:
    """Cut a module's parameter along `dim`, in equal parts, one per tensor-parallel rank.

    Args:
        module: that owns it.
        name: of the parameter.
        dim: which is cut.
        stride: number of matrices fused along `dim`.

    Raises:
        ValueError: the dim cannot be cut so.
    """
    whole = module.get_parameter(name)
    group = active_group("tp")
    spec = equal_shards(whole.shape, dim, rank=group.rank, size=group.size, stride=stride)
    made = nn.Parameter(part_of(whole, spec), requires_grad=whole.requires_grad)
    set_shard_spec(made, spec)
    set_partition_attributes(made, partition_dim=dim % whole.dim(), num_partitions=group.size, stride=stride)
    module.register_parameter(name, made)


def mark_partial_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Say of whole parameters that each rank has a part of their gradient, to be summed before the optimizer's step."""
    for parameter in parameters:
        parameter.sequence_parallel_enabled = True  # type: ignore[attr-defined]
