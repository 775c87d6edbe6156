"""The transport of one group through shared memory.

Callers have checked their arguments; tensors are on the CPU. Results carry no gradient.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_state.collectives.transport import MessageTransport, Pending, Receive, ReduceOp, Result, Send
from nxd_state.shared_memory.algorithms import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce_scatter
from nxd_state.shared_memory.channel import Channel, SharedMemoryError, Steps
from nxd_state.shared_memory.copying import plain
from nxd_state.shared_memory.messages import Inbox, Outbox
from nxd_state.shared_memory.progress import Lane, Progress
from nxd_state.shared_memory.reduction import check_reducible
from nxd_state.shared_memory.rounds import Rounds


class SharedMemoryTransport(MessageTransport):
    """A group's collectives, one after the other, and its messages, one after the other from each rank to each.

    Attributes:
        is_open: whether the group has not been destroyed.
    """

    def __init__(self, channel: Channel, progress: Progress) -> None:
        self._channel, self._progress = channel, progress
        self.is_open = True
        self._rounds = Rounds(channel)
        self._lane = Lane(channel, progress)
        self._outboxes = {peer: (Outbox(channel, peer), Lane(channel, progress)) for peer in channel.peers}
        self._inboxes = {peer: (Inbox(channel, peer), Lane(channel, progress)) for peer in channel.peers}

    @property
    def bytes(self) -> int:
        """The most memory that all ranks of the group may take together."""
        return self._channel.bytes

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """A new tensor with the ranks' tensors combined."""
        if async_op:  # of a copy: the caller may write the tensor at once
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            return self.all_reduce_(copy, op, async_op=True)
        return self._progress.complete(self._lane, self._all_reduce(tensor, op, in_place=False))

    def all_reduce_(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine into `tensor` itself."""
        steps = self._all_reduce(tensor, op, in_place=True)
        if async_op:
            return self._begin(self._lane, steps, tensor)
        self._progress.complete(self._lane, steps)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, *, async_op: bool = False) -> Result:
        """Concatenate along `dim`."""
        steps = all_gather(self._rounds, _detached(tensor), dim)
        if async_op:
            return self._begin(self._lane, steps, tensor)
        return self._progress.complete(self._lane, steps)

    def all_gather_(self, tensor: Tensor, *, async_op: bool = False) -> Result:
        """By messages, which fill the tensor; `all_gather` makes a new one."""
        channel = self._channel
        pending = Pending(tensor, self._gather_by_messages(_detached(tensor), channel.rank, len(channel.ranks)))
        return pending if async_op else pending.wait()

    def reduce_scatter(self, tensor: Tensor, dim: int, op: ReduceOp, *, async_op: bool = False) -> Result:
        """Combine, and keep this rank's part along `dim`."""
        check_reducible(tensor.dtype, op)
        steps = reduce_scatter(self._rounds, _detached(tensor), dim, op)
        if async_op:
            return self._begin(self._lane, steps, tensor)
        return self._progress.complete(self._lane, steps)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int, *, async_op: bool = False) -> Result:
        """Exchange along `split_dim`, concatenate along `concat_dim`."""
        steps = all_to_all(self._rounds, _detached(tensor), split_dim, concat_dim)
        if async_op:
            return self._begin(self._lane, steps, tensor)
        return self._progress.complete(self._lane, steps)

    def all_to_all_v(self, tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """By messages: a rank does not know how much the others exchange, and so how many rounds that would take."""
        return self._exchange_by_messages(_detached(tensor), send_counts, receive_counts, self._channel.rank)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """A copy of the tensor of the rank with that index."""
        return self._progress.complete(self._lane, broadcast(self._rounds, _detached(tensor), source))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._progress.complete(self._lane, barrier(self._rounds))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by pickle."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([data.numel()], device="cpu")).tolist()
        padded = torch.empty(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        gathered = self._gathered(padded).view(len(sizes), -1)
        return [pickle.loads(row[:size].numpy()) for row, size in zip(gathered, sizes, strict=True)]

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send to the rank with that index, and wait until the tensor may be written."""
        outbox, lane = self._outboxes[destination]
        self._progress.complete(lane, outbox.send(plain(tensor)))

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive from the rank with that index into a contiguous tensor."""
        inbox, lane = self._inboxes[source]
        self._progress.complete(lane, inbox.receive(tensor))

    def begin_messages(self, messages: Sequence[Send | Receive]) -> list[Pending[Tensor]]:
        """Begin to send and to receive."""
        return [self._begin_message(message) for message in messages]

    def abort(self, reason: str) -> None:
        """End this rank's part: what the others wait for in this group, now or later, raises there."""
        if not self._progress.is_foreign:
            self._channel.leave(reason, failed=True)
            self._progress.abandon(self._channel, SharedMemoryError(f"this rank has aborted it: {reason}"))

    def close(self) -> None:
        """Leave the group; what the others still need of this rank in it, beyond what is done, raises there."""
        self.is_open = False
        if not self._progress.is_foreign:
            self._channel.leave("it has destroyed the group (destroy_model_parallel), or is ending", failed=False)
            self._progress.abandon(self._channel, SharedMemoryError("it has been destroyed (destroy_model_parallel)"))

    def _gathered(self, tensor: Tensor) -> Tensor:
        return self._progress.complete(self._lane, all_gather(self._rounds, tensor, 0))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, *, in_place: bool) -> Steps:
        check_reducible(tensor.dtype, op)
        return all_reduce(self._rounds, _detached(tensor), op, in_place=in_place)

    def _begin_message(self, message: Send | Receive) -> Pending[Tensor]:
        if isinstance(message, Send):
            outbox, lane = self._outboxes[message.destination]
            return self._begin(lane, outbox.send(plain(message.tensor)), message.tensor)
        inbox, lane = self._inboxes[message.source]
        return self._begin(lane, inbox.receive(message.tensor), message.tensor)

    def _begin(self, lane: Lane, steps: Steps, tensor: Tensor) -> Pending[Tensor]:
        """The handle of an operation; `tensor` is kept until it is done."""
        operation = self._progress.begin(lane, steps)
        return Pending(tensor, operation, finish=lambda _: operation.wait())


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor
