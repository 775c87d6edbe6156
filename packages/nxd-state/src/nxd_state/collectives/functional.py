"""Collectives as graph operations, for code that torch.compile or torch.export is recording.

A graph refers to a process group by its registered name, so the same graph serves every rank. Callers have checked
their arguments and handled groups of one.
"""

from typing import Any

import torch.distributed._functional_collectives as funcol
from torch import Tensor

from nxd_state.group import Group

# torch 2.13 gives these two a shorter name.
_all_gather_single = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
_reduce_scatter_single = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def all_reduce(tensor: Tensor, group: Group, op: str) -> Tensor:
    """Sum, or what `op` says."""
    reduced = funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), _summed(op), _name(group)))
    return reduced / group.size if op == "avg" else reduced


def all_gather(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Gather along `dim`."""
    return funcol.wait_tensor(_all_gather_single(tensor.contiguous(), dim, _name(group)))


def reduce_scatter(tensor: Tensor, group: Group, dim: int, op: str) -> Tensor:
    """Reduce, and keep this rank's part along `dim`."""
    reduced = funcol.wait_tensor(_reduce_scatter_single(tensor.contiguous(), _summed(op), dim, _name(group)))
    return reduced / group.size if op == "avg" else reduced


def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """Exchange along `split_dim`, concatenate along `concat_dim`."""
    length = tensor.shape[split_dim] // group.size
    parts = tensor.unflatten(split_dim, (group.size, length)).movedim(split_dim, 0).contiguous()
    received = funcol.wait_tensor(funcol.all_to_all_single(parts, None, None, _name(group)))
    return received.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def broadcast(tensor: Tensor, group: Group, source: int) -> Tensor:
    """Copy from the rank with index `source` in the group."""
    # Unlike torch.distributed.broadcast, this counts the source within the group.
    return funcol.wait_tensor(funcol.broadcast(tensor.contiguous(), source, _name(group)))


def _summed(op: str) -> str:
    """The reduction to ask for: gloo has no average, so that is summed, then divided."""
    return "sum" if op == "avg" else op


def _name(group: Group) -> Any:
    """The registered name, which newer versions of torch want as a subtype of str that older ones do not have."""
    return group.name
