"""Messages between two ranks of a `Group`: blocking, without waiting, or several at once.

Those from one rank to another arrive in the order in which they were sent, and both ends ask for them in that order.
XLA has none: there a message is a part of the graph that all ranks share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nxd_state.collectives import debug, eager
from nxd_state.collectives.eager import Pending
from nxd_state.collectives.messages import Receive, Send
from nxd_state.collectives.shared import pending_of, shared_memory_of
from nxd_state.group import Group


def send(tensor: Tensor, group: Group, *, destination: int) -> None:
    """Send to the rank with index `destination` in the group; returns when the tensor may be reused.

    Raises:
        ValueError: the group has no such index, or it is this rank's own.
        RuntimeError: the tensor is on an XLA device.
    """
    _check("destination", destination, tensor, group)
    if debug.enabled():
        debug.confirm_message(_announce(Send(tensor, destination), group))
    memory = shared_memory_of(tensor, group)
    if memory is not None:
        memory.send(tensor, destination)
    else:
        eager.send(tensor, group, destination)


def recv(tensor: Tensor, group: Group, *, source: int) -> Tensor:
    """Receive into `tensor` (contiguous, of the shape and dtype sent) from index `source` in the group.

    Raises:
        ValueError: the group has no such index, or it is this rank's own; or `tensor` is not contiguous.
        RuntimeError: the tensor is on an XLA device.
    """
    _check("source", source, tensor, group)
    _check_receivable(tensor)
    if debug.enabled():
        debug.confirm_message(_announce(Receive(tensor, source), group))
    memory = shared_memory_of(tensor, group)
    if memory is None:
        return eager.recv(tensor, group, source)
    memory.recv(tensor, source)
    return tensor


def isend(tensor: Tensor, group: Group, *, destination: int) -> Pending:
    """Begin to send to index `destination` in the group; `wait()` returns when the tensor may be written again.

    Raises:
        ValueError: the group has no such index, or it is this rank's own.
        RuntimeError: the tensor is on an XLA device.
    """
    (pending,) = batch_isend_irecv([Send(tensor, destination)], group)
    return pending


def irecv(tensor: Tensor, group: Group, *, source: int) -> Pending:
    """Begin to receive into `tensor`, see `recv`; `wait()` gives it once it is there. Leave it alone until then.

    Raises:
        ValueError: the group has no such index, or it is this rank's own; or `tensor` is not contiguous.
        RuntimeError: the tensor is on an XLA device.
    """
    (pending,) = batch_isend_irecv([Receive(tensor, source)], group)
    return pending


def batch_isend_irecv(messages: Sequence[Send | Receive], group: Group) -> list[Pending]:
    """Begin several messages at once, so that two ranks that send to each other do not wait for one another.

    Returns:
        For each message what `isend` or `irecv` gives.

    Raises:
        ValueError: the group has no such index, or it is this rank's own; or a tensor to receive into is not
            contiguous. Nothing has been sent then.
        RuntimeError: a tensor is on an XLA device. Nothing has been sent then.
    """
    for message in messages:
        if isinstance(message, Send):
            _check("destination", message.destination, message.tensor, group)
        else:
            _check("source", message.source, message.tensor, group)
            _check_receivable(message.tensor)
    if not messages:
        return []
    if not debug.enabled():
        return _begin(messages, group)
    announced = [_announce(message, group) for message in messages]
    under_way = _begin(messages, group)
    confirmed = map(_Confirmed, announced, under_way)
    return [Pending(message.tensor, it) for message, it in zip(messages, confirmed, strict=True)]


def check_index(name: str, index: int, group: Group) -> None:
    """Raises ValueError where the group has no rank of that index."""
    if not 0 <= index < group.size:
        raise ValueError(f"{name}={index} is outside {group}; use an index in the group, 0..{group.size - 1}")


@dataclass(frozen=True)
class _Confirmed:
    """A message in debug mode: whoever waits for it learns first whether the other end means the same."""

    announcement: debug.Announcement
    under_way: Pending

    def wait(self) -> None:
        debug.confirm_message(self.announcement)
        self.under_way.wait()


def _check(name: str, peer: int, tensor: Tensor, group: Group) -> None:
    check_index(name, peer, group)
    if peer == group.rank:
        raise ValueError(f"{name}={peer} is this rank itself in {group}; no message is needed")
    if tensor.device.type == "xla":
        raise RuntimeError(
            f"cannot exchange a tensor on {tensor.device} with one other rank: XLA has only collectives, which "
            "all ranks of a group take part in; run pipelines on cpu or cuda (NXD_DEVICE=cpu)"
        )


def _check_receivable(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"cannot receive into a non-contiguous tensor of shape {tuple(tensor.shape)}; "
            "receive into a contiguous one and copy"
        )


def _begin(messages: Sequence[Send | Receive], group: Group) -> list[Pending]:
    memories = [shared_memory_of(message.tensor, group) for message in messages]
    others = [message for message, memory in zip(messages, memories, strict=True) if memory is None]
    other_pendings = iter(eager.batch_isend_irecv(others, group) if others else ())
    return [
        next(other_pendings) if memory is None else pending_of(message.tensor, memory.begin_message(message))
        for message, memory in zip(messages, memories, strict=True)
    ]


def _announce(message: Send | Receive, group: Group) -> debug.Announcement:
    if isinstance(message, Send):
        ends = debug.pair(group, group.rank, message.destination)
    else:
        ends = debug.pair(group, message.source, group.rank)
    return debug.announce("send to recv", ends, message.tensor, {})
