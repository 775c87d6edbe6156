"""Messages from one rank of a group to another, cut into chunks that pass through the slots between the two.

The sender counts chunks sent, the receiver chunks received; each slot's signature says what the message is.
"""

from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Awaited, Channel, SharedMemoryError, Steps
from nxd_state.shared_memory.copying import copy_bytes
from nxd_state.shared_memory.layout import MESSAGE_SLOTS, piece_of


class Outbox:
    """Messages from this rank to one other."""

    def __init__(self, channel: Channel, peer: int) -> None:
        self._channel, self._peer = channel, peer
        self._sent_word = channel.layout.sent(peer)
        self._received_word = channel.layout.received(channel.rank)  # of the peer
        self._slots = [
            channel.segments[channel.rank].address + channel.layout.message_slot(peer, chunk)
            for chunk in range(MESSAGE_SLOTS)
        ]
        self._sent = 0

    def send(self, tensor: Tensor) -> Steps:
        """Send a contiguous tensor."""
        channel, peer = self._channel, self._peer
        what = signature.encode("send to recv", tensor.numel(), tensor.dtype)
        address, size = tensor.data_ptr(), tensor.nbytes
        piece = piece_of(size, channel.layout.message_slot_bytes)
        for start in range(0, max(1, size), piece):
            chunk = self._sent
            received = chunk - MESSAGE_SLOTS + 1
            if channel.read(peer, self._received_word) < received:
                yield Awaited(self._received_word, received, (peer,))
            slot = chunk % MESSAGE_SLOTS
            copy_bytes(self._slots[slot], address + start, min(size - start, piece))
            channel.set_own(self._sent_word + 1 + slot, what)
            self._sent += 1
            channel.publish_to(peer, self._sent_word, self._sent)
        return tensor


class Inbox:
    """Messages from one other rank to this one."""

    def __init__(self, channel: Channel, peer: int) -> None:
        self._channel, self._peer = channel, peer
        self._sent_word = channel.layout.sent(channel.rank)  # of the peer
        self._received_word = channel.layout.received(peer)
        self._slots = [
            channel.segments[peer].address + channel.layout.message_slot(channel.rank, chunk)
            for chunk in range(MESSAGE_SLOTS)
        ]
        self._received = 0

    def receive(self, tensor: Tensor) -> Steps:
        """Receive into a contiguous tensor.

        Raises:
            SharedMemoryError: a tensor of another dtype or size has been sent.
        """
        channel, peer = self._channel, self._peer
        what = signature.encode("send to recv", tensor.numel(), tensor.dtype)
        address, size = tensor.data_ptr(), tensor.nbytes
        piece = piece_of(size, channel.layout.message_slot_bytes)
        for start in range(0, max(1, size), piece):
            chunk = self._received
            if channel.read(peer, self._sent_word) <= chunk:
                yield Awaited(self._sent_word, chunk + 1, (peer,))
            slot = chunk % MESSAGE_SLOTS
            sent = channel.read(peer, self._sent_word + 1 + slot)
            if sent != what:
                raise SharedMemoryError(self._mismatch(sent, what))
            copy_bytes(address + start, self._slots[slot], min(size - start, piece))
            self._received += 1
            channel.publish_to(peer, self._received_word, self._received)
        return tensor

    def _mismatch(self, sent: int, expected: int) -> str:
        channel = self._channel
        return (
            f"ranks of {channel.title} disagree about a message: rank {channel.ranks[self._peer]} sent "
            f"{signature.describe(sent)}, rank {channel.ranks[channel.rank]} receives {signature.describe(expected)}"
        )
