"""Collectives on torch.distributed process groups (gloo, nccl), run as they are called.

Operations that only move data move bytes, so they work for every dtype. Callers have checked their arguments and
handled groups of one. Nothing here is recorded by autograd.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_state.collectives.transport import MessageTransport, Pending, Receive, ReduceOp, Result, Send
from nxd_state.device import has_uneven_all_to_all, is_cpu
from nxd_state.group import Group
from nxd_state.process_groups import transport_device

_NO_TAG = 0  # messages between two ranks are told apart by their order

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has no average: summed, then divided
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_LOCAL_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(dim=0, dtype=parts.dtype),
    "avg": lambda parts: parts.mean(dim=0),
    "max": lambda parts: parts.amax(dim=0),
    "min": lambda parts: parts.amin(dim=0),
}

# torch 2.13 gives these two a shorter name and warns about the one before.
_all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class C10dTransport(MessageTransport):
    """Collectives and messages of a torch.distributed process group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """By a copy that is reduced in place."""
        return self.all_reduce_(tensor.detach().clone(memory_format=torch.contiguous_format), op, async_op=async_op)

    @torch.no_grad()
    def all_reduce_(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Reduce into `tensor`; by way of a contiguous copy where it is not contiguous."""
        buffer = tensor.contiguous()  # `tensor` itself where it is contiguous
        work = dist.all_reduce(buffer, op=_REDUCE_OPS[op], group=self._group.process_group, async_op=True)
        size = self._group.size

        @torch.no_grad()
        def finish(reduced: Tensor) -> Tensor:
            if op == "avg":
                reduced.div_(size)
            return tensor if reduced is tensor else tensor.copy_(reduced)

        return _result(Pending(buffer, work, finish=finish), async_op=async_op)

    @torch.no_grad()
    def all_gather(self, tensor: Tensor, dim: int, *, async_op: bool = False) -> Result:
        """Gather along `dim`."""
        sent, size = _as_bytes(tensor), self._group.size
        received = sent.new_empty(size * sent.numel())
        work = _all_gather_single(received, sent, group=self._group.process_group, async_op=True)
        dtype, shape = tensor.dtype, (size, *tensor.shape)
        pending = Pending(received, work, finish=lambda data: _join(data.view(dtype).view(shape), dim))
        return _result(pending, async_op=async_op)

    @torch.no_grad()
    def all_gather_(self, tensor: Tensor, *, async_op: bool = False) -> Result:
        """On the CPU by messages: gloo gathers into memory of its own and copies from there."""
        group = self._group
        if tensor.is_cpu:
            return _result(self._gather_by_messages(tensor, group.rank, group.size), async_op=async_op)
        received = _as_bytes(tensor)
        own = received.chunk(group.size)[group.rank]
        work = _all_gather_single(received, own, group=group.process_group, async_op=True)
        return _result(Pending(tensor, work), async_op=async_op)

    @torch.no_grad()
    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Reduce, and keep this rank's part along `dim`."""
        size = self._group.size
        parts = _split(tensor, size, dim)
        if tensor.is_cpu:
            # gloo reduces everything everywhere and then drops the rest: exchanging the parts and summing them
            # here moves half the bytes, and adds in rank order, so that the result does not depend on timing.
            received, work = _exchange(parts, self._group)
            dtype, shape = parts.dtype, parts.shape
            add = _LOCAL_REDUCTIONS[op]
            pending = Pending(received, work, finish=lambda data: add(data.view(dtype).view(shape)))
            return _result(pending, async_op=async_op)
        result = torch.empty_like(parts[0])
        process_group = self._group.process_group
        flat = (result.view(-1), parts.view(-1))  # a shape that every backend takes
        scattered = _reduce_scatter_single(*flat, op=_REDUCE_OPS[op], group=process_group, async_op=True)
        divide = (lambda reduced: reduced.div_(size)) if op == "avg" else None
        return _result(Pending(result, scattered, finish=divide), async_op=async_op)

    @torch.no_grad()
    def reduce_scatter_mean(
        self, tensor: Tensor, *, sum_dtype: torch.dtype, dtype: torch.dtype, out: Tensor | None = None
    ) -> Pending[Tensor]:
        """Average and keep this rank's part; on the CPU by messages."""
        if tensor.is_cpu:
            return self._average_by_messages(tensor, self._group.rank, self._group.size, dtype, out)
        return super().reduce_scatter_mean(tensor, sum_dtype=sum_dtype, dtype=dtype, out=out)

    @torch.no_grad()
    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, *, async_op: bool = False) -> Result:
        """Exchange along `split_dim`, concatenate along `concat_dim`."""
        parts = _split(tensor, self._group.size, split_dim)
        received, work = _exchange(parts, self._group)
        dtype, shape = parts.dtype, parts.shape
        pending = Pending(received, work, finish=lambda data: _join(data.view(dtype).view(shape), concat_dim))
        return _result(pending, async_op=async_op)

    @torch.no_grad()
    def all_to_all_v(self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Exchange that many rows with each rank."""
        if not has_uneven_all_to_all(tensor):  # gloo's own would copy them twice
            return self._exchange_by_messages(tensor, send_counts, receive_counts, self._group.rank)
        received = tensor.new_empty((sum(receive_counts), *tensor.shape[1:]))
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        dist.all_to_all_single(
            _as_bytes(received),
            _as_bytes(tensor),
            output_split_sizes=[count * row for count in receive_counts],
            input_split_sizes=[count * row for count in send_counts],
            group=self._group.process_group,
        )
        return received

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """A copy of `tensor`, overwritten with that of the rank with index `source` in the group."""
        copy = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(_as_bytes(copy), src=self._group.ranks[source], group=self._group.process_group)
        return copy

    @torch.no_grad()
    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to the rank with index `destination` in the group."""
        dist.send(_as_bytes(tensor), dst=self._group.ranks[destination], group=self._group.process_group)

    @torch.no_grad()
    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive into the contiguous `tensor`."""
        dist.recv(_as_bytes(tensor), src=self._group.ranks[source], group=self._group.process_group)

    def begin_messages(self, messages: Sequence[Send | Receive]) -> list[Pending[Tensor]]:
        """Begin all messages, which are at least one."""
        if len(messages) > 1 and not messages[0].tensor.is_cpu:  # nccl may deadlock on one after the other
            return self._begin_as_one(messages)
        return [self._begin(message) for message in messages]

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        device = transport_device(self._group)
        if is_cpu(device):
            dist.barrier(group=self._group.process_group)
        else:  # by a sum, as nccl's is made; that of the neuron backend knows the world only
            met = torch.ones(1, device=device)
            dist.all_reduce(met, group=self._group.process_group)
            met.cpu()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather by pickle."""
        values: list[Any] = [None] * self._group.size
        dist.all_gather_object(values, value, group=self._group.process_group)
        return values

    @torch.no_grad()
    def _begin(self, message: Send | Receive) -> Pending[Tensor]:
        # The process group itself is asked: what dist.isend does besides takes longer than sending.
        process_group, data = self._group.process_group, _as_bytes(message.tensor)
        assert process_group is not None  # there is a peer
        peer = message.destination if isinstance(message, Send) else message.source
        peer = dist.get_group_rank(process_group, self._group.ranks[peer])
        if isinstance(message, Send):
            return Pending(message.tensor, process_group.send([data], peer, _NO_TAG))
        return Pending(message.tensor, process_group.recv([data], peer, _NO_TAG))

    @torch.no_grad()
    def _begin_as_one(self, messages: Sequence[Send | Receive]) -> list[Pending[Tensor]]:
        works = dist.batch_isend_irecv([_operation(message, self._group) for message in messages])
        if len(works) < len(messages):  # nccl makes one of them all
            works *= len(messages)
        return [Pending(message.tensor, work) for message, work in zip(messages, works, strict=True)]


def _result(pending: Pending[Tensor], *, async_op: bool) -> Result:
    return pending if async_op else pending.wait()


def _operation(message: Send | Receive, group: Group) -> dist.P2POp:
    data = _as_bytes(message.tensor)
    if isinstance(message, Send):
        return dist.P2POp(dist.isend, data, group.ranks[message.destination], group.process_group)
    return dist.P2POp(dist.irecv, data, group.ranks[message.source], group.process_group)


def _exchange(parts: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """Send part i of the stack to rank i of the group; the bytes received lie in the same order."""
    sent = _as_bytes(parts)
    received = torch.empty_like(sent)
    work: Any = dist.all_to_all_single(received, sent, group=group.process_group, async_op=True)
    return received, work


def _as_bytes(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor of bytes, in the same memory where the tensor is contiguous."""
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def _split(tensor: Tensor, parts: int, dim: int) -> Tensor:
    """Equal parts along `dim`, stacked on a new dim 0, contiguous."""
    if dim == 0:
        return tensor.contiguous().view(parts, tensor.shape[0] // parts, *tensor.shape[1:])
    return torch.stack(tensor.chunk(parts, dim=dim))


def _join(parts: Tensor, dim: int) -> Tensor:
    """The parts stacked on dim 0, concatenated along `dim` of each."""
    if dim == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(0), dim=dim)
