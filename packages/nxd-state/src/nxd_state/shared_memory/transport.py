"""The transport of one group through shared memory, and the kernels through which compiled graphs use it.

Callers have checked their arguments; tensors are on the CPU. Results carry no gradient.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from nxd_state.collectives.transport import MessageTransport, Pending, Receive, ReduceOp, Result, Send
from nxd_state.shared_memory.algorithms import (
    REDUCTIONS,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    check_reducible,
    reduce_scatter,
)
from nxd_state.shared_memory.channel import Inbox, Outbox, Rounds, SharedChannel, SharedMemoryError, Steps
from nxd_state.shared_memory.memory import plain
from nxd_state.shared_memory.progress import OperationQueue, ProgressEngine


class SharedMemoryTransport(MessageTransport):
    """A group's collectives, in order, and its messages, in order between each two ranks.

    Attributes:
        is_open: whether the group has not been destroyed.
    """

    def __init__(self, channel: SharedChannel, progress: ProgressEngine) -> None:
        self._channel, self._progress = channel, progress
        self.is_open = True
        self._rounds = Rounds(channel)
        self._queue = OperationQueue(channel, progress)
        self._outboxes = {peer: (Outbox(channel, peer), OperationQueue(channel, progress)) for peer in channel.peers}
        self._inboxes = {peer: (Inbox(channel, peer), OperationQueue(channel, progress)) for peer in channel.peers}

    @property
    def bytes(self) -> int:
        """The most memory that all ranks of the group may take together."""
        return self._channel.bytes

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """A new tensor with the ranks' tensors combined."""
        if async_op:  # of a copy: the caller may write the tensor at once
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            return self.all_reduce_(copy, op, async_op=True)
        return self._progress.complete(self._queue, self._all_reduce(tensor, op, in_place=False))

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine into `tensor` itself."""
        steps = self._all_reduce(tensor, op, in_place=True)
        if async_op:
            return self._begin(self._queue, steps, tensor)
        self._progress.complete(self._queue, steps)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, *, async_op: bool = False) -> Result:
        """Concatenate along `dim`."""
        return self._run(all_gather(self._rounds, _detached(tensor), dim), tensor, async_op=async_op)

    def all_gather_(self, tensor: Tensor, *, async_op: bool = False) -> Result:
        """Gather by messages, which fill the tensor; `all_gather` makes a new one."""
        channel = self._channel
        pending = Pending(tensor, self._gather_by_messages(_detached(tensor), channel.rank, len(channel.ranks)))
        return pending if async_op else pending.wait()

    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine, and keep this rank's part along `dim`."""
        check_reducible(tensor.dtype, op)
        return self._run(reduce_scatter(self._rounds, _detached(tensor), dim, op), tensor, async_op=async_op)

    def reduce_scatter_mean(
        self, tensor: Tensor, *, sum_dtype: torch.dtype, dtype: torch.dtype, out: Tensor | None = None
    ) -> Pending[Tensor]:
        """Average by messages, and keep this rank's part."""
        channel = self._channel
        return self._average_by_messages(_detached(tensor), channel.rank, len(channel.ranks), dtype, out)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, *, async_op: bool = False) -> Result:
        """Exchange along `split_dim`, concatenate along `concat_dim`."""
        steps = all_to_all(self._rounds, _detached(tensor), split_dim, concat_dim)
        return self._run(steps, tensor, async_op=async_op)

    def all_to_all_v(self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Exchange by messages: a rank does not know how many rounds the others' exchanges would take."""
        return self._exchange_by_messages(_detached(tensor), send_counts, receive_counts, self._channel.rank)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """A copy of the tensor of the rank with that index."""
        return self._progress.complete(self._queue, broadcast(self._rounds, _detached(tensor), source))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._progress.complete(self._queue, barrier(self._rounds))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by pickle."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([data.numel()], device="cpu")).tolist()
        padded = torch.empty(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        gathered = self._gathered(padded).view(len(sizes), -1)
        return [pickle.loads(row[:size].numpy()) for row, size in zip(gathered, sizes, strict=True)]

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to the rank with that index, and wait until the tensor may be overwritten."""
        outbox, queue = self._outboxes[destination]
        self._progress.complete(queue, outbox.send(plain(tensor)))

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive from the rank with that index into a contiguous tensor."""
        inbox, queue = self._inboxes[source]
        self._progress.complete(queue, inbox.receive(tensor))

    def begin_messages(self, messages: Sequence[Send | Receive]) -> list[Pending[Tensor]]:
        """Begin to send and receive."""
        return [self._begin_message(message) for message in messages]

    def abort(self, reason: str) -> None:
        """Leave as failed: operations of the others in this group raise, now and later."""
        if not self._progress.is_foreign:
            self._channel.leave(reason, failed=True)
            self._progress.abandon(self._channel, SharedMemoryError(f"this rank has aborted it: {reason}"))

    def close(self) -> None:
        """Leave the group; operations of the others that still need this rank raise there."""
        self.is_open = False
        if not self._progress.is_foreign:
            self._channel.leave("it has destroyed the group (destroy_model_parallel), or is ending", failed=False)
            self._progress.abandon(self._channel, SharedMemoryError("it has been destroyed (destroy_model_parallel)"))

    def _gathered(self, tensor: Tensor) -> Tensor:
        return self._progress.complete(self._queue, all_gather(self._rounds, tensor, 0))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, *, in_place: bool) -> Steps:
        check_reducible(tensor.dtype, op)
        return all_reduce(self._rounds, _detached(tensor), op, in_place=in_place)

    def _run(self, steps: Steps, tensor: Tensor, *, async_op: bool) -> Result:
        if async_op:
            return self._begin(self._queue, steps, tensor)
        return self._progress.complete(self._queue, steps)

    def _begin_message(self, message: Send | Receive) -> Pending[Tensor]:
        if isinstance(message, Send):
            outbox, queue = self._outboxes[message.destination]
            return self._begin(queue, outbox.send(plain(message.tensor)), message.tensor)
        inbox, queue = self._inboxes[message.source]
        return self._begin(queue, inbox.receive(message.tensor), message.tensor)

    def _begin(self, queue: OperationQueue, steps: Steps, tensor: Tensor) -> Pending[Tensor]:
        """The handle of an operation; `tensor` is kept until it is done."""
        operation = self._progress.begin(queue, steps)
        return Pending(tensor, operation, finish=lambda _: operation.wait())


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


_NAMESPACE = "_c10d_functional"
_Kernel = Callable[..., Any]  # gives a tensor

_transports: dict[str, tuple[SharedMemoryTransport, dist.ProcessGroup]] = {}
_libraries: list[torch.library.Library] = []  # kernels live as long as their library


def serve_graphs(transport: SharedMemoryTransport, process_group: dist.ProcessGroup) -> None:
    """Let graphs that name this process group use its memory, until it is destroyed."""
    for name in [name for name in _transports if not _is_live(*_transports[name])]:
        del _transports[name]
    _transports[process_group.group_name] = transport, process_group
    if not _libraries:
        _install()


def _install() -> None:
    library = torch.library.Library(_NAMESPACE, "IMPL")
    for operator, kernel in _KERNELS.items():
        library.impl(operator, functools.partial(_dispatch, kernel, _torch_kernel(operator)), "CPU")
    _libraries.append(library)


def _dispatch(kernel: _Kernel, torch_kernel: _Kernel, tensor: Tensor, *arguments: Any) -> Any:
    *others, name = arguments
    transport, process_group = _transports.get(getattr(name, "group_name", name), (None, None))
    if transport is None or process_group is None or not _is_live(transport, process_group):
        return torch_kernel(tensor, *arguments)
    if isinstance(others[0], str) and others[0] not in REDUCTIONS:
        return torch_kernel(tensor, *arguments)
    return kernel(transport, tensor, *others)


def _is_live(transport: SharedMemoryTransport, process_group: dist.ProcessGroup) -> bool:
    """Names are given again once a group is destroyed."""
    return transport.is_open and process_group in _world.pg_names


def _torch_kernel(operator: str) -> _Kernel:
    overload = getattr(torch.ops, _NAMESPACE).__getattr__(operator).default
    return functools.partial(overload._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)


# Kernels for compiled and exported graphs. The graphs still contain torch's functional collectives, which name a group,
# so other compilers understand them. On the CPU these operators look the group up. If it shares memory, the collective
# runs through it, with nothing left to wait for; otherwise torch's own kernel runs. Torch's kernel also runs for an
# all-to-all, whose parts may have any size, and for reductions that `nxd_state.collectives` lacks.
_KERNELS: dict[str, _Kernel] = {
    "all_reduce": lambda transport, tensor, op: transport.all_reduce(tensor, op),
    "all_reduce_": lambda transport, tensor, op: transport.all_reduce_(tensor, op),
    "all_gather_into_tensor": lambda transport, tensor, group_size: transport.all_gather(tensor, 0),
    "reduce_scatter_tensor": lambda transport, tensor, op, group_size: transport.reduce_scatter(tensor, 0, op),
    "broadcast": lambda transport, tensor, source: transport.broadcast(tensor, source),
    "broadcast_": lambda transport, tensor, source: tensor.copy_(transport.broadcast(tensor, source)),
}
