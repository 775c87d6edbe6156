"""Collectives as graph operations, for code that torch.compile or torch.export is recording.

A graph refers to a process group by its registered name, so the same graph serves every rank. Callers have checked
their arguments and handled groups of one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from nxd_state.collectives.transport import ReduceOp, Result, Transport, ready
from nxd_state.group import Group

# torch 2.13 gives these two a shorter name.
_all_gather_single = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
_reduce_scatter_single = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


class FunctionalTransport(Transport):
    """Collectives of a group as torch's functional ones; there is nothing to wait for while a graph is recorded."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine by `op`."""
        return ready(self._all_reduced(tensor, op), async_op=async_op)

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Reduce, and copy into `tensor`."""
        return ready(tensor.copy_(self._all_reduced(tensor, op)), async_op=async_op)

    def all_gather(self, tensor: Tensor, dim: int, *, async_op: bool = False) -> Result:
        """Gather along `dim`."""
        return ready(self._gathered(tensor, dim), async_op=async_op)

    def all_gather_(self, tensor: Tensor, *, async_op: bool = False) -> Result:
        """Gather this rank's part, told by data and not by the graph, and copy into `tensor`."""
        parts = tensor.view(self._group.size, -1)
        own = parts.index_select(0, self._group.rank_tensor(tensor).view(1))
        return ready(tensor.copy_(self._gathered(own, 0).view(tensor.shape)), async_op=async_op)

    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Reduce, and keep this rank's part along `dim`."""
        # torch 2.9's own way along other dims calls a node `self`, which breaks the code of strictly exported graphs.
        parts = _split(tensor, self._group.size, dim).flatten(0, 1)
        reduced = funcol.wait_tensor(_reduce_scatter_single(parts, _summed(op), 0, _name(self._group)))
        return ready(reduced / self._group.size if op == "avg" else reduced, async_op=async_op)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, *, async_op: bool = False) -> Result:
        """Exchange along `split_dim`, concatenate along `concat_dim`."""
        parts = _split(tensor, self._group.size, split_dim)
        received = funcol.wait_tensor(funcol.all_to_all_single(parts, None, None, _name(self._group)))
        return ready(received.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1), async_op=async_op)

    def all_to_all_v(self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Exchange that many rows with each rank; the counts are constants of the graph."""
        counts = (list(receive_counts), list(send_counts))
        return funcol.wait_tensor(funcol.all_to_all_single(tensor.contiguous(), *counts, _name(self._group)))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy from the rank with index `source` in the group."""
        # Unlike torch.distributed.broadcast, this counts the source within the group.
        return funcol.wait_tensor(funcol.broadcast(tensor.contiguous(), source, _name(self._group)))

    def _all_reduced(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        reduced = funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), _summed(op), _name(self._group)))
        return reduced / self._group.size if op == "avg" else reduced

    def _gathered(self, tensor: Tensor, dim: int) -> Tensor:
        gathered = funcol.wait_tensor(_all_gather_single(tensor.contiguous(), 0, _name(self._group)))
        # torch 2.12's own way along other dims calls a function that its compiler does not trace.
        return torch.cat(gathered.chunk(self._group.size), dim) if dim else gathered


def _split(tensor: Tensor, parts: int, dim: int) -> Tensor:
    """Equal parts along `dim`, stacked on a new dim 0, contiguous."""
    return tensor.unflatten(dim, (parts, tensor.shape[dim] // parts)).movedim(dim, 0).contiguous()


def _summed(op: ReduceOp) -> str:
    """The reduction to ask for: gloo has no average, so that is summed, then divided."""
    return "sum" if op == "avg" else op


def _name(group: Group) -> Any:
    """The registered name, which newer versions of torch want as a subtype of str that older ones do not have."""
    return group.name
