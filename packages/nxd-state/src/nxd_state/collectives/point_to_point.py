"""Messages between two ranks of a `Group`: blocking, without waiting, or several at once.

Messages from one rank to another arrive in the order in which they were sent; both ends ask for them in that order.
On XLA none leaves at once: a message is a small graph that both ends run, one message after the other. There the ranks
need one order of all messages in which each waits for both its ends; those of one batch are ordered here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nxd_state.collectives import debug, traffic
from nxd_state.collectives.choice import eager_transport_of
from nxd_state.collectives.transport import MessageTransport, Pending, Receive, Send
from nxd_state.device import is_lazy_device
from nxd_state.group import Group


def send(tensor: Tensor, group: Group, *, destination: int) -> None:
    """Send to the rank with index `destination` in the group; returns when the tensor may be reused.

    Raises:
        ValueError: the group has no such index, or it is this rank's own.
    """
    _check("destination", destination, tensor, group)
    if debug.enabled():
        debug.confirm_message(_announce(Send(tensor, destination), group))
    if traffic.is_counted():
        traffic.note("message", group, tensor.nbytes)
    eager_transport_of(tensor, group).send(tensor, destination)


def recv(tensor: Tensor, group: Group, *, source: int) -> Tensor:
    """Receive into `tensor` (contiguous, of the shape and dtype sent) from index `source` in the group.

    Raises:
        ValueError: the group has no such index, or it is this rank's own; or `tensor` is not contiguous.
    """
    _check("source", source, tensor, group)
    _check_receivable(tensor)
    if debug.enabled():
        debug.confirm_message(_announce(Receive(tensor, source), group))
    eager_transport_of(tensor, group).recv(tensor, source)
    return tensor


def isend(tensor: Tensor, group: Group, *, destination: int) -> Pending[Tensor]:
    """Begin to send to index `destination` in the group; `wait()` returns when the tensor may be written again.

    Raises:
        ValueError: the group has no such index, or it is this rank's own.
    """
    (pending,) = batch_isend_irecv([Send(tensor, destination)], group)
    return pending


def irecv(tensor: Tensor, group: Group, *, source: int) -> Pending[Tensor]:
    """Begin to receive into `tensor`, see `recv`; `wait()` returns it once received. Do not touch it before.

    Raises:
        ValueError: the group has no such index, or it is this rank's own; or `tensor` is not contiguous.
    """
    (pending,) = batch_isend_irecv([Receive(tensor, source)], group)
    return pending


def batch_isend_irecv(messages: Sequence[Send | Receive], group: Group) -> list[Pending[Tensor]]:
    """Begin several messages at once, so that two ranks that send to each other do not wait for one another.

    Returns:
        For each message what `isend` or `irecv` gives.

    Raises:
        ValueError: the group has no such index, or it is this rank's own; or a tensor to receive into is not
            contiguous. Nothing has been sent then.
    """
    for message in messages:
        if isinstance(message, Send):
            _check("destination", message.destination, message.tensor, group)
        else:
            _check("source", message.source, message.tensor, group)
            _check_receivable(message.tensor)
    if not messages:
        return []
    if traffic.is_counted():
        for message in messages:
            if isinstance(message, Send):
                traffic.note("message", group, message.tensor.nbytes)
    if not debug.enabled():
        return _begin(messages, group)
    announced = [_announce(message, group) for message in messages]
    under_way = _begin(messages, group)
    confirmations = map(_Confirmation, announced)
    ends = zip(messages, confirmations, under_way, strict=True)
    return [Pending(message.tensor, confirmation, pending) for message, confirmation, pending in ends]


def check_index(name: str, index: int, group: Group) -> None:
    """Raise a ValueError if the group has no rank with that index."""
    if not 0 <= index < group.size:
        raise ValueError(f"{name}={index} is outside {group}; use an index in the group, 0..{group.size - 1}")


@dataclass(frozen=True)
class _Confirmation:
    """In debug mode, a wait for a message first checks that the other end announced the same message."""

    announcement: debug.Announcement

    def wait(self) -> None:
        debug.confirm_message(self.announcement)


def _check(name: str, peer: int, tensor: Tensor, group: Group) -> None:
    check_index(name, peer, group)
    if peer == group.rank:
        raise ValueError(f"{name}={peer} is this rank itself in {group}; no message is needed")


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether the elements are contiguous and unconjugated, so that received bytes can be written there."""
    return tensor.is_contiguous() and not (tensor.is_complex() and tensor.is_conj())


def _check_receivable(tensor: Tensor) -> None:
    if not is_plain_memory(tensor):
        raise ValueError(
            f"cannot receive into a non-contiguous tensor of shape {tuple(tensor.shape)} (or a conjugate view); "
            "receive into a contiguous one and copy"
        )


def _begin(messages: Sequence[Send | Receive], group: Group) -> list[Pending[Tensor]]:
    """Each transport gets all of its own messages at once; those that block come last, so that the others are begun."""
    parts: dict[type[MessageTransport], tuple[MessageTransport, list[int]]] = {}
    for index, message in enumerate(messages):
        transport = eager_transport_of(message.tensor, group)
        parts.setdefault(type(transport), (transport, []))[1].append(index)
    if len(parts) == 1:
        return transport.begin_messages(messages)
    begun: dict[int, Pending[Tensor]] = {}
    for transport, indices in sorted(parts.values(), key=lambda part: is_lazy_device(messages[part[1][0]].tensor)):
        begun |= zip(indices, transport.begin_messages([messages[index] for index in indices]), strict=True)
    return [begun[index] for index in range(len(messages))]


def _announce(message: Send | Receive, group: Group) -> debug.Announcement:
    if isinstance(message, Send):
        ends = debug.pair(group, group.rank, message.destination)
    else:
        ends = debug.pair(group, message.source, group.rank)
    return debug.announce("send to recv", ends, message.tensor, {})
