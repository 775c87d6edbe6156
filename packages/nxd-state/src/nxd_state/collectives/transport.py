"""The interface of all transports, which carry a group's tensors; handles of pending operations; and messages.

A transport serves one group. Its callers have checked their arguments and handled groups of one. Four classes
implement it: `SharedMemoryTransport`, `C10dTransport`, `XlaTransport` and `FunctionalTransport`; `choice` picks one.

The main thread counts how long it waits for other ranks; the rest of a step is its own work. Backward runs in it on the
CPU. On an accelerator the queue waits and not the caller, so nothing is counted there.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

_waited_seconds = 0.0
_depth_of_waits = 0


def wait_seconds() -> float:
    """Seconds that the main thread has spent in collectives and messages since the process began, on the CPU."""
    return _waited_seconds


def begin_wait() -> float | None:
    """Begin to wait; pass the result to `end_wait`. Waits may be nested."""
    global _depth_of_waits  # noqa: PLW0603 - the process has one main thread
    if threading.get_ident() != threading.main_thread().ident:
        return None
    _depth_of_waits += 1
    return time.perf_counter()


def end_wait(began: float | None) -> None:
    """End the wait that `begin_wait` began."""
    global _depth_of_waits, _waited_seconds  # noqa: PLW0603
    if began is None:
        return
    _depth_of_waits -= 1
    if _depth_of_waits == 0:
        _waited_seconds += time.perf_counter() - began


T = TypeVar("T")

ReduceOp = Literal["sum", "avg", "max", "min"]


class Work(Protocol):
    """Work that a `Pending` waits for: a `torch.distributed.Work`, another `Pending`, ..."""

    def wait(self) -> Any:
        """Wait until it is done."""


class Pending(Generic[T]):
    """Collectives or messages under way. `wait()` may be called more than once.

    Args:
        result: the result of `wait`, or the input of `finish`; kept alive until then.
        works: the operations under way, waited for in this order.
        finish: makes the result, once, after all works are done: casts, unflattens, adds.
    """

    def __init__(self, result: T, *works: Work, finish: Callable[[T], T] | None = None) -> None:
        self._result = result
        self._works = works
        self._finish = finish

    def wait(self) -> T:
        """The result, once it is available (on CUDA: once the current stream is ordered after it)."""
        if self._works:
            began = begin_wait()
            try:
                for work in self._works:
                    work.wait()
            finally:
                end_wait(began)
            self._works = ()
        if self._finish is not None:
            self._result = self._finish(self._result)
            self._finish = None
        return self._result

    def then(self, finish: Callable[[T], T]) -> "Pending[T]":
        """The same work, with `finish` applied to the result."""
        return Pending(self._result, self, finish=lambda _: finish(self.wait()))


Result: TypeAlias = Tensor | Pending[Tensor]


def ready(tensor: Tensor, *, async_op: bool) -> Result:
    """A result that is already available, or part of a graph, in the form the caller asked for."""
    return Pending(tensor) if async_op else tensor


@dataclass(frozen=True, slots=True)
class Send:
    """`tensor` goes to the rank with index `destination` in the group."""

    tensor: Tensor
    destination: int


@dataclass(frozen=True, slots=True)
class Receive:
    """The rank with index `source` in the group sends what `tensor` (contiguous, of that shape and dtype) receives."""

    tensor: Tensor
    source: int


class Transport(ABC):
    """The collectives of one group, as `nxd_state.collectives` describes them; results carry no gradient.

    With `async_op=True` a method gives a `Pending`, else the tensor itself.
    """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """A new tensor with the ranks' tensors combined; with `async_op` the input may be written at once."""

    @abstractmethod
    def all_reduce_(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine into `tensor`, which need not be contiguous."""

    def all_reduce_coalesced_(self, tensors: Sequence[Tensor], op: ReduceOp) -> None:
        """Combine into each of the tensors, of one dtype."""
        for tensor in tensors:
            self.all_reduce_(tensor, op)

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int, *, async_op: bool = False) -> Result:
        """Concatenate along `dim`."""

    @abstractmethod
    def all_gather_(self, tensor: Tensor, *, async_op: bool = False) -> Result:
        """Fill a contiguous `tensor` with the ranks' equal parts of it along dim 0; each sends its own from there."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine, and keep this rank's part along `dim`."""

    def reduce_scatter_mean(
        self, tensor: Tensor, *, sum_dtype: torch.dtype, dtype: torch.dtype, out: Tensor | None = None
    ) -> Pending[Tensor]:
        """Average a 1-d tensor, summed in `sum_dtype`, and keep this rank's part, in `dtype`."""
        pending = self.reduce_scatter(tensor.to(sum_dtype), 0, "avg", async_op=True)
        assert isinstance(pending, Pending)
        return pending.then(lambda mean: mean.to(dtype))

    @abstractmethod
    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, *, async_op: bool = False) -> Result:
        """Exchange along `split_dim`, concatenate along `concat_dim`."""

    @abstractmethod
    def all_to_all_v(self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Exchange that many rows of dim 0 with each rank."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """A copy of the tensor of the rank with that index."""


class MessageTransport(Transport):
    """A transport that also carries messages from one rank to another; graphs that torch compiles have none."""

    @abstractmethod
    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to the rank with that index, and return when the tensor may be written."""

    @abstractmethod
    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive from the rank with that index into a contiguous tensor."""

    @abstractmethod
    def begin_messages(self, messages: Sequence[Send | Receive]) -> list[Pending[Tensor]]:
        """Begin messages, at least one; their handles give their tensors."""

    def _exchange_by_messages(
        self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], rank: int
    ) -> Tensor:
        """`all_to_all_v` in which each rank sends every other its rows; no rows take no message."""
        received = tensor.new_empty((sum(receive_counts), *tensor.shape[1:]))
        outgoing, incoming = tensor.split(list(send_counts)), received.split(list(receive_counts))
        others = [index for index in range(len(send_counts)) if index != rank]
        messages: list[Send | Receive] = [Receive(incoming[it], it) for it in others if incoming[it].numel()]
        messages += [Send(outgoing[it], it) for it in others if outgoing[it].numel()]
        pending = self.begin_messages(messages) if messages else []
        incoming[rank].copy_(outgoing[rank])
        for message in pending:
            message.wait()
        return received

    def _gather_by_messages(self, tensor: Tensor, rank: int, size: int) -> Pending[Tensor]:
        """`all_gather_` in which each rank sends its part straight to every other."""
        parts = tensor.chunk(size)
        others = [index for index in range(size) if index != rank]
        receives = [Receive(parts[index], index) for index in others]
        sends = [Send(parts[rank], index) for index in others]
        return Pending(tensor, *self.begin_messages([*receives, *sends]))

    def _average_by_messages(
        self, tensor: Tensor, rank: int, size: int, dtype: torch.dtype, out: Tensor | None
    ) -> Pending[Tensor]:
        """`reduce_scatter_mean` in which each part goes straight to the rank that sums it, in float32 or wider.

        gloo's own reduce-scatter moves twice the bytes, and its all-to-all copies them twice (24 MB among 2 ranks:
        13 ms; 19 ms through all-to-all, 29 ms by all-reduce).
        """
        parts = tensor.chunk(size)
        received = [torch.empty_like(part) for part in parts[2:]]
        received.insert(0, out if out is not None and out.dtype == tensor.dtype else torch.empty_like(parts[0]))
        others = [index for index in range(size) if index != rank]
        receives = [Receive(part.view(torch.uint8), index) for part, index in zip(received, others, strict=True)]
        sends = [Send(parts[index].view(torch.uint8), index) for index in others]
        messages = self.begin_messages([*receives, *sends])

        @torch.no_grad()
        def add(own: Tensor) -> Tensor:
            total = received[0].to(torch.promote_types(own.dtype, torch.float32))
            for part in (*received[1:], own):
                total += part
            total.div_(size)
            return total.to(dtype) if out is None or out is total else out.copy_(total)

        return Pending(parts[rank], *messages, finish=add)
