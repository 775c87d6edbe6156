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
    # torch 2.9's own way along other dims calls a node `self`, which breaks the code of strictly exported graphs.
    parts = _split(tensor, group.size, dim).flatten(0, 1)
    reduced = funcol.wait_tensor(_reduce_scatter_single(parts, _summed(op), 0, _name(group)))
    return reduced / group.size if op == "avg" else reduced


def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """Exchange along `split_dim`, concatenate along `concat_dim`."""
    parts = _split(tensor, group.size, split_dim)
    received = funcol.wait_tensor(funcol.all_to_all_single(parts, None, None, _name(group)))
    return received.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def broadcast(tensor: Tensor, group: Group, source: int) -> Tensor:
    """Copy from the rank with index `source` in the group."""
    # Unlike torch.distributed.broadcast, this counts the source within the group.
    return funcol.wait_tensor(funcol.broadcast(tensor.contiguous(), source, _name(group)))


def _split(tensor: Tensor, parts: int, dim: int) -> Tensor:
    """Equal parts along `dim`, stacked on a new dim 0, contiguous."""
    return tensor.unflatten(dim, (parts, tensor.shape[dim] // parts)).movedim(dim, 0).contiguous()


def _summed(op: str) -> str:
    """The reduction to ask for: gloo has no average, so that is summed, then divided."""
    return "sum" if op == "avg" else op


def _name(group: Group) -> Any:
    """The registered name, which newer versions of torch want as a subtype of str that older ones do not have."""
    return group.name
