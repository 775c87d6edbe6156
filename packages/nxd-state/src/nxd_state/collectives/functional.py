"""Collectives as graph operations, for code that torch.compile or torch.export is recording.

A graph refers to a process group by its registered name, so the same graph serves every rank.
"""

import torch.distributed._functional_collectives as funcol
from torch import Tensor

from nxd_state.group import Group


def all_reduce(tensor: Tensor, group: Group, op: str) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), op, group.name))


def all_gather(tensor: Tensor, group: Group, dim: int) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(tensor.contiguous(), dim, group.name))


def reduce_scatter(tensor: Tensor, group: Group, dim: int, op: str) -> Tensor:
    return funcol.wait_tensor(funcol.reduce_scatter_tensor(tensor.contiguous(), op, dim, group.name))


def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    parts = tensor.unflatten(split_dim, (group.size, -1)).movedim(split_dim, 0).contiguous()
    received = funcol.wait_tensor(funcol.all_to_all_single(parts, None, None, group.name))
    return received.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def broadcast(tensor: Tensor, group: Group, source: int) -> Tensor:
    return funcol.wait_tensor(funcol.broadcast(tensor.contiguous(), group.ranks[source], group.name))
