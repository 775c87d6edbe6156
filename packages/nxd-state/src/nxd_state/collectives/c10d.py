"""Collectives on torch.distributed process groups (gloo, nccl), run as they are called.

What only moves data moves it as bytes, so that it serves every dtype. Callers have checked their arguments and
handled groups of one. Nothing here is recorded by autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_state.collectives.messages import Receive, Send
from nxd_state.group import Group

_NO_TAG = 0  # messages between two ranks are told apart by their order

ReduceOp = Literal["sum", "avg", "max", "min"]

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
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Work(Protocol):
    def wait(self) -> Any: ...


class Pending:
    """A collective under way. `wait()` may be called more than once."""

    def __init__(
        self, result: Tensor, work: _Work | None = None, finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._result = result
        self._work = work
        self._finish = finish

    def wait(self) -> Tensor:
        """The collective's result, once it is there (on CUDA: once the current stream is ordered after it)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result = self._finish(self._result)
            self._finish = None
        return self._result


@torch.no_grad()
def all_reduce_(tensor: Tensor, group: Group, op: ReduceOp) -> Pending:
    """Reduce into `tensor`; by way of a contiguous copy where it is not contiguous."""
    buffer = tensor.contiguous()  # `tensor` itself where it is contiguous
    work = dist.all_reduce(buffer, op=_REDUCE_OPS[op], group=group.process_group, async_op=True)

    @torch.no_grad()
    def finish(reduced: Tensor) -> Tensor:
        if op == "avg":
            reduced.div_(group.size)
        return tensor if reduced is tensor else tensor.copy_(reduced)

    return Pending(buffer, work, finish)


@torch.no_grad()
def all_gather(tensor: Tensor, group: Group, dim: int) -> Pending:
    """Gather along `dim`."""
    sent = _as_bytes(tensor)
    received = sent.new_empty(group.size * sent.numel())
    work = _all_gather_single(received, sent, group=group.process_group, async_op=True)
    dtype, shape = tensor.dtype, (group.size, *tensor.shape)
    return Pending(received, work, lambda data: _join(data.view(dtype).view(shape), dim))


@torch.no_grad()
def reduce_scatter(tensor: Tensor, group: Group, dim: int, op: ReduceOp) -> Pending:
    """Reduce, and keep this rank's part along `dim`."""
    parts = _split(tensor, group.size, dim)
    if tensor.device.type == "cpu":
        # gloo reduces everything everywhere and then drops the rest: exchanging the parts and summing them
        # here moves half the bytes, and adds in rank order, so that the result does not depend on timing.
        received, work = _exchange(parts, group)
        return Pending(received, work, lambda data: _LOCAL_REDUCTIONS[op](data.view(parts.dtype).view(parts.shape)))
    result = torch.empty_like(parts[0])
    work = _reduce_scatter_single(result, parts, op=_REDUCE_OPS[op], group=group.process_group, async_op=True)
    return Pending(result, work, (lambda reduced: reduced.div_(group.size)) if op == "avg" else None)


@torch.no_grad()
def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """Exchange along `split_dim`, concatenate along `concat_dim`."""
    parts = _split(tensor, group.size, split_dim)
    received, work = _exchange(parts, group)
    work.wait()
    return _join(received.view(parts.dtype).view(parts.shape), concat_dim)


@torch.no_grad()
def broadcast(tensor: Tensor, group: Group, source: int) -> Tensor:
    """A copy of `tensor`, overwritten with that of the rank with index `source` in the group."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(_as_bytes(copy), src=group.ranks[source], group=group.process_group)
    return copy


@torch.no_grad()
def send(tensor: Tensor, group: Group, destination: int) -> None:
    """Send to the rank with index `destination` in the group."""
    dist.send(_as_bytes(tensor), dst=group.ranks[destination], group=group.process_group)


@torch.no_grad()
def recv(tensor: Tensor, group: Group, source: int) -> Tensor:
    """Receive into the contiguous `tensor`."""
    dist.recv(_as_bytes(tensor), src=group.ranks[source], group=group.process_group)
    return tensor


def batch_isend_irecv(messages: Sequence[Send | Receive], group: Group) -> list[Pending]:
    """Begin all messages, which are at least one."""
    if len(messages) > 1 and messages[0].tensor.device.type != "cpu":  # nccl may deadlock on one after the other
        return _begin_as_one(messages, group)
    return [_begin(message, group) for message in messages]


@torch.no_grad()
def _begin(message: Send | Receive, group: Group) -> Pending:
    # The process group itself is asked: what dist.isend does besides takes longer than sending.
    process_group, data = group.process_group, _as_bytes(message.tensor)
    assert process_group is not None  # there is a peer
    peer = message.destination if isinstance(message, Send) else message.source
    peer = dist.get_group_rank(process_group, group.ranks[peer])
    if isinstance(message, Send):
        return Pending(message.tensor, process_group.send([data], peer, _NO_TAG))
    return Pending(message.tensor, process_group.recv([data], peer, _NO_TAG))


@torch.no_grad()
def _begin_as_one(messages: Sequence[Send | Receive], group: Group) -> list[Pending]:
    works = dist.batch_isend_irecv([_operation(message, group) for message in messages])
    if len(works) < len(messages):  # nccl makes one of them all
        works *= len(messages)
    return [Pending(message.tensor, work) for message, work in zip(messages, works, strict=True)]


def _operation(message: Send | Receive, group: Group) -> dist.P2POp:
    data = _as_bytes(message.tensor)
    if isinstance(message, Send):
        return dist.P2POp(dist.isend, data, group.ranks[message.destination], group.process_group)
    return dist.P2POp(dist.irecv, data, group.ranks[message.source], group.process_group)


def barrier(group: Group) -> None:
    """Wait for all ranks of the group."""
    dist.barrier(group=group.process_group)


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Gather by pickle."""
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def _exchange(parts: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """Send part i of the stack to rank i of the group; the bytes received lie in the same order."""
    sent = _as_bytes(parts)
    received = torch.empty_like(sent)
    return received, dist.all_to_all_single(received, sent, group=group.process_group, async_op=True)


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
