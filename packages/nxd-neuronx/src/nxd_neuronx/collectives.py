"""Collectives with the arguments of torch-xla's, which scripts for NeuronX Distributed give, over any transport."""

from collections.abc import Sequence
from typing import cast

import nxd_state
import torch.distributed as dist
from nxd_state import Group
from nxd_state.collectives.transport import ReduceOp
from torch import Tensor

Groups = dist.ProcessGroup | Sequence[Sequence[int]] | None

_OPS = ("sum", "max", "min")


def all_reduce(
    op_type: str | dist.ReduceOp, tensor_bucket: Tensor | Sequence[Tensor], groups: Groups, pin_layout: bool = True
) -> list[Tensor]:
    """Combine the ranks' tensors, in place; returns them as a list.

    Args:
        op_type: "sum", "max" or "min", or torch's name.
        tensor_bucket: one, or several.
        groups: a process group, or the ranks of all groups; all ranks if None.
        pin_layout: taken for scripts that give it.

    Raises:
        ValueError: another operation, or this rank is in no group.
    """
    tensors = [tensor_bucket] if isinstance(tensor_bucket, Tensor) else list(tensor_bucket)
    group, op = _group(groups), _op(op_type)
    for tensor in tensors:
        nxd_state.all_reduce_(tensor, group, op=op)
    return tensors


def all_gather(
    input: Tensor,
    dim: int = 0,
    groups: Groups = None,
    output: Tensor | None = None,
    pin_layout: bool = True,
) -> Tensor:
    """Concatenate the ranks' tensors along `dim`, also into `output` if it is given.

    `groups` and errors are those of `all_reduce`.
    """
    whole = nxd_state.all_gather(input, _group(groups), dim=dim)
    return whole if output is None else output.copy_(whole)


def reduce_scatter(
    reduce_type: str | dist.ReduceOp,
    input: Tensor,
    scale: float = 1,
    scatter_dim: int = 0,
    shard_count: int | None = None,
    groups: Groups = None,
    output: Tensor | None = None,
    pin_layout: bool = True,
) -> Tensor:
    """Combine the ranks' tensors and keep this rank's equal part along `scatter_dim`, also in `output` if given.

    Args:
        reduce_type: as `op_type` of `all_reduce`.
        input: of the same shape on all ranks.
        scale: factor of the result.
        scatter_dim: the dim that is cut.
        shard_count: ranks of the group, if it is given.
        groups: as for `all_reduce`.
        output: gets the result.
        pin_layout: taken for scripts that give it.

    Raises:
        ValueError: as for `all_reduce`; a `shard_count` that is not the group's size, or does not divide the dim.
    """
    group = _group(groups)
    if shard_count not in (None, group.size):
        raise ValueError(f"shard_count={shard_count} is not the number of ranks, {group.size}; leave it out")
    part = nxd_state.reduce_scatter(input, group, dim=scatter_dim, op=_op(reduce_type))
    part = part if scale == 1 else part * scale
    return part if output is None else output.copy_(part)


cpu_reduce_scatter = reduce_scatter


def gloo_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: str | dist.ReduceOp,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Tensor:
    """`reduce_scatter` along dim 0 into `output`, finished when it returns; arguments as in torch.distributed."""
    return reduce_scatter(op, input, groups=group, output=output)


def _group(groups: Groups) -> Group:
    if groups is None:
        return nxd_state.get_world_group()
    return nxd_state.group_of(groups) if isinstance(groups, dist.ProcessGroup) else nxd_state.group_among(groups)


def _op(given: str | dist.ReduceOp) -> ReduceOp:
    name = given if isinstance(given, str) else str(given).rpartition(".")[2].lower()
    if name not in _OPS:
        raise ValueError(f"{given!r} is not a reduction; use one of {', '.join(map(repr, _OPS))}")
    return cast(ReduceOp, name)
