"""Collectives as operations of the graph that torch-xla records: they run with the rest of it, at the step's boundary.

Each names the replica groups of the whole axis, never this rank, so every rank records the same graph. Layouts are not
pinned: the compiler may choose them. Callers have checked their arguments and handled groups of one. torch-xla's own
reductions do nothing in a single-process job; the groups are known here, so its C++ functions are called directly.

Stages of a pipeline record different graphs, and a device that runs one with a collective waits until all of its ranks
run theirs. Each message between stages is therefore a graph of its own, the same on all ranks that take part.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nxd_state.collectives.transport import MessageTransport, Pending, Receive, ReduceOp, Result, Send, ready
from nxd_state.device import step_boundary, torch_xla_module
from nxd_state.group import Group

_PIN_LAYOUT = False


class XlaTransport(MessageTransport):
    """Collectives and messages of a group as operations of graphs; a handle has nothing to wait for."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._groups = [list(ranks) for ranks in group.replica_groups]

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine by `op`."""
        return ready(self._all_reduced(tensor, op), async_op=async_op)

    @torch.no_grad()
    def all_reduce_(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Reduce into `tensor`."""
        return ready(tensor.copy_(self._all_reduced(tensor, op)), async_op=async_op)

    @torch.no_grad()
    def all_reduce_coalesced_(self, tensors: Sequence[Tensor], op: ReduceOp) -> None:
        """By one operation."""
        kind, scale = self._reduction(op)
        with self._own_graph_between_stages():
            _xla_model().torch_xla._XLAC._xla_all_reduce_inplace(kind, list(tensors), scale, self._groups, _PIN_LAYOUT)

    def all_gather(self, tensor: Tensor, dim: int, *, async_op: bool = False) -> Result:
        """Gather along `dim`."""
        return ready(self._gathered(tensor, dim), async_op=async_op)

    @torch.no_grad()
    def all_gather_(self, tensor: Tensor, *, async_op: bool = False) -> Result:
        """Gather this rank's part, told by data and not by the graph, and copy into `tensor`."""
        parts = tensor.view(self._group.size, -1)
        own = parts.index_select(0, self._group.rank_tensor(tensor).view(1))
        return ready(tensor.copy_(self._gathered(own, 0).view(tensor.shape)), async_op=async_op)

    @torch.no_grad()
    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Reduce, and keep this rank's part along `dim`."""
        kind, scale = self._reduction(op)
        with self._own_graph_between_stages():
            scattered = _xla_model().reduce_scatter(
                kind,
                tensor,
                scale=scale,
                scatter_dim=dim,
                shard_count=self._group.size,
                groups=self._groups,
                pin_layout=_PIN_LAYOUT,
            )
        return ready(scattered, async_op=async_op)

    @torch.no_grad()
    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, *, async_op: bool = False) -> Result:
        """Exchange along `split_dim`, concatenate along `concat_dim`."""
        size = self._group.size
        with self._own_graph_between_stages():
            exchange = _xla_model().all_to_all
            exchanged = exchange(tensor, split_dim, concat_dim, size, self._groups, pin_layout=_PIN_LAYOUT)
        return ready(exchanged, async_op=async_op)

    def all_to_all_v(self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Refused: the counts would be constants of this rank's graph."""
        raise NotImplementedError(
            "all_to_all_v on XLA would record another graph on each rank; pad the parts to one length for all_to_all"
        )

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Sum the source's tensor and the others' zeros: the source is selected by data, so all ranks share a graph."""
        is_source = self._group.rank_tensor(tensor) == source
        whole = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        return self._all_reduced(torch.where(is_source, whole, torch.zeros_like(whole)), "sum").to(tensor.dtype)

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send, by a graph of its own."""
        self.begin_messages([Send(tensor, destination)])

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive into `tensor`, by a graph of its own."""
        self.begin_messages([Receive(tensor, source)])

    @torch.no_grad()
    def begin_messages(self, messages: Sequence[Send | Receive]) -> list[Pending[Tensor]]:
        """Send, and receive into the tensors given; each message is a permute that both its ends run as a graph.

        All ranks take theirs in one order, by the ends, so that none waits for another in a circle.
        """
        step_boundary()
        ends = [(*_ends(message, self._group), message.tensor) for message in messages]
        for source, destination, tensor in sorted(ends, key=_by_ends):
            pairs = [[ranks[source], ranks[destination]] for ranks in self._groups]
            carried = _xla_model().collective_permute(tensor.detach(), pairs)
            step_boundary()
            if destination == self._group.rank:
                tensor.copy_(carried)
        return [Pending(message.tensor) for message in messages]

    @torch.no_grad()
    def _all_reduced(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        kind, scale = self._reduction(op)
        with self._own_graph_between_stages():
            return _xla_model().torch_xla._XLAC._xla_all_reduce(kind, tensor, scale, self._groups, _PIN_LAYOUT)

    @torch.no_grad()
    def _gathered(self, tensor: Tensor, dim: int) -> Tensor:
        with self._own_graph_between_stages():
            return _xla_model().all_gather(tensor, dim=dim, groups=self._groups, pin_layout=_PIN_LAYOUT)

    @contextmanager
    def _own_graph_between_stages(self) -> Iterator[None]:
        if self._group.crosses_stages:
            step_boundary()
        yield
        if self._group.crosses_stages:
            step_boundary()

    def _reduction(self, op: ReduceOp) -> tuple[str, float]:
        """XLA's name of the reduction, and the factor of its result."""
        return ("sum", 1.0 / self._group.size) if op == "avg" else (op, 1.0)


def _ends(message: Send | Receive, group: Group) -> tuple[int, int]:
    if isinstance(message, Send):
        return group.rank, message.destination
    return message.source, group.rank


def _by_ends(message: tuple[int, int, Tensor]) -> tuple[int, int]:
    return message[:2]


def _xla_model() -> Any:
    return torch_xla_module("core.xla_model")
