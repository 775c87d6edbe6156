"""Collectives on torch.distributed process groups (gloo, nccl), run as they are called.

Callers have checked their arguments and handled groups of one.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_state.group import Group

ReduceOp = Literal["sum", "avg", "max", "min"]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has no average: summed, then divided
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_LOCAL_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(dim=0),
    "avg": lambda parts: parts.mean(dim=0),
    "max": lambda parts: parts.amax(dim=0),
    "min": lambda parts: parts.amin(dim=0),
}


class Pending:
    """A collective under way. `wait()` may be called more than once."""

    def __init__(
        self, result: Tensor, work: dist.Work | None = None, finish: Callable[[Tensor], Tensor] | None = None
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


def all_reduce_(tensor: Tensor, group: Group, op: ReduceOp) -> Pending:
    _check_op(op)
    buffer = tensor if tensor.is_contiguous() else tensor.contiguous()
    work = dist.all_reduce(buffer, op=_REDUCE_OPS[op], group=group.process_group, async_op=True)

    def finish(reduced: Tensor) -> Tensor:
        if op == "avg":
            reduced = reduced.div_(group.size)
        return reduced if reduced is tensor else tensor.copy_(reduced)

    return Pending(buffer, work, finish)


def all_gather(tensor: Tensor, group: Group, dim: int) -> Pending:
    source = _as_bytes(tensor.contiguous())
    gathered = source.new_empty((group.size, *source.shape))
    work = dist.all_gather_into_tensor(gathered.view(-1), source.view(-1), group=group.process_group, async_op=True)
    return Pending(gathered, work, lambda parts: _join(parts.view(tensor.dtype), dim))


def reduce_scatter(tensor: Tensor, group: Group, dim: int, op: ReduceOp) -> Pending:
    _check_op(op)
    parts = _split(tensor, group.size, dim)
    if dist.get_backend(group.process_group) == "gloo":
        # gloo reduces everything everywhere and then drops the rest: exchanging the parts and summing them
        # here moves half the bytes, and adds in rank order, so that the result does not depend on timing.
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=group.process_group, async_op=True)
        return Pending(received, work, _LOCAL_REDUCTIONS[op])
    result = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(result, parts, op=_REDUCE_OPS[op], group=group.process_group, async_op=True)
    return Pending(result, work, (lambda reduced: reduced.div_(group.size)) if op == "avg" else None)


def all_to_all(tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    parts = _as_bytes(_split(tensor, group.size, split_dim))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group.process_group)
    return _join(received.view(tensor.dtype), concat_dim)


def broadcast(tensor: Tensor, group: Group, source: int) -> Tensor:
    buffer = _as_bytes(tensor.clone(memory_format=torch.contiguous_format))
    dist.broadcast(buffer, src=group.ranks[source], group=group.process_group)
    return buffer.view(tensor.dtype)


def send(tensor: Tensor, group: Group, destination: int) -> None:
    dist.send(_as_bytes(tensor.contiguous()), dst=group.ranks[destination], group=group.process_group)


def recv(tensor: Tensor, group: Group, source: int) -> Tensor:
    dist.recv(_as_bytes(tensor), src=group.ranks[source], group=group.process_group)
    return tensor


def barrier(group: Group) -> None:
    dist.barrier(group=group.process_group)


def all_gather_object(value: Any, group: Group) -> list[Any]:
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def _check_op(op: str) -> None:
    if op not in _REDUCE_OPS:
        raise ValueError(f"op={op!r} is not a reduction; use one of {list(get_args(ReduceOp))}")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Float8 and the like, which transports do not know, travel as bytes; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _split(tensor: Tensor, parts: int, dim: int) -> Tensor:
    """Equal parts along `dim`, stacked on a new dim 0, contiguous."""
    if dim == 0:
        return tensor.contiguous().view(parts, -1, *tensor.shape[1:])
    return torch.stack(tensor.chunk(parts, dim=dim))


def _join(parts: Tensor, dim: int) -> Tensor:
    """The parts stacked on dim 0, concatenated along `dim` of each."""
    if dim == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(0), dim=dim)
