"""`SharedChannel`: the memory that the ranks of one group share, and how they meet in it, in rounds and by messages.

Each rank writes its own segment and reads those of the others; `memory.SegmentLayout` says where.
"""

import zlib
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nxd_state.processes import Process
from nxd_state.shared_memory.memory import (
    LEFT,
    LONGEST_REASON,
    MESSAGE_SLOTS,
    POSTED,
    REASON,
    REASON_LENGTH,
    REDUCED,
    ROUND_SLOTS,
    SIGNATURES,
    SLOT_BYTES,
    Segment,
    SegmentLayout,
    copy_bytes,
    describe_signature,
    encode_signature,
    piece_of,
)
from nxd_state.shared_memory.wakeups import ANYTHING, PeerEventCount, notify_all
from nxd_state.store_messages import PeerError

_DONE, _FAILED = 1, 2  # how a rank has left
_GROUP_AT, _RANK_AT = 24, 16  # bits of the code of an event: group (32), rank (8), word (16)


class Awaited(NamedTuple):
    """A condition: the word of each of these peers has reached a value."""

    word: int
    value: int
    peers: Sequence[int]


# A collective or message in steps: it yields the condition that it waits for, and returns its result.
Steps = Generator[Awaited, None, Tensor]


class SharedMemoryError(RuntimeError):
    """A collective through shared memory cannot be completed."""


class LostPeerError(SharedMemoryError, PeerError):
    """A rank that it needs has ended, failed, or not arrived in time."""


@dataclass(frozen=True)
class Peer:
    """Another rank of the group."""

    process: Process
    segment: Segment
    event_count: PeerEventCount


class SharedChannel:
    """The memory that one group shares.

    Args:
        title: the name of the group in errors.
        ranks: the global ranks of the group.
        rank: index of this rank.
        own: segment of this rank.
        neighbours: the other ranks, by index.
        timeout: how many seconds a collective may wait for a peer.
    """

    def __init__(
        self,
        title: str,
        ranks: tuple[int, ...],
        rank: int,
        own: Segment,
        neighbours: dict[int, Peer],
        timeout: float,
    ) -> None:
        self.title, self.ranks, self.rank, self.timeout = title, ranks, rank, timeout
        self.size = len(ranks)
        self.layout = SegmentLayout(self.size)
        self.peers = tuple(neighbours)
        self.segments = [neighbours[index].segment if index in neighbours else own for index in range(self.size)]
        self.error: BaseException | None = None
        self._code = self._code_of(rank)
        self._own_words = own.words
        self._own = own
        self._words = [segment.words for segment in self.segments]
        self._peer_words = [neighbour.segment.words for neighbour in neighbours.values()]
        self._neighbours = neighbours
        self._event_counts = [neighbour.event_count for neighbour in neighbours.values()]

    @property
    def bytes(self) -> int:
        """The most memory that all ranks' segments of this group may take together."""
        return self.size * self.layout.bytes

    def publish(self, word: int, value: int) -> None:
        """Set one of this rank's words that peers may wait for."""
        self._own_words[word] = value
        notify_all(self._event_counts, self._code | word)

    def publish_to(self, peer: int, word: int, value: int) -> None:
        """Set one of this rank's words that only `peer` may wait for."""
        self._own_words[word] = value
        notify_all((self._neighbours[peer].event_count,), self._code | word)

    def behind(self, word: int, value: int) -> bool:
        """Whether the word of some peer has not reached `value`."""
        for words in self._peer_words:  # noqa: SIM110 - any() with a generator takes twice as long
            if words[word] < value:
                return True
        return False

    def lacks(self, awaited: Awaited) -> bool:
        """Whether some peer has not reached the awaited value."""
        word, value, peers = awaited
        for peer in peers:  # noqa: SIM110 - as above
            if self._words[peer][word] < value:
                return True
        return False

    def read(self, index: int, word: int) -> int:
        """A word of the rank of that index."""
        return self._words[index][word]

    def set_own(self, word: int, value: int) -> None:
        """Set one of this rank's words that is read after another one is published."""
        self._own_words[word] = value

    def missing(self, awaited: Awaited) -> list[int]:
        """The peers that have not reached the awaited value."""
        return [peer for peer in awaited.peers if self._words[peer][awaited.word] < awaited.value]

    def code_of_first(self, awaited: Awaited) -> int | None:
        """The code of the event to wait for: the word of the first missing peer; None if no peer is missing."""
        missing = self.missing(awaited)
        return self._code_of(missing[0]) | awaited.word if missing else None

    def _code_of(self, index: int) -> int:
        return zlib.crc32(self.title.encode()) << _GROUP_AT | (index + 1) << _RANK_AT

    def process(self, peer: int) -> Process:
        """The process of another rank."""
        return self._neighbours[peer].process

    def leave(self, reason: str, *, failed: bool) -> None:
        """Tell the peers that this rank no longer takes part; the first reason stays.

        What has been published stays readable.

        Args:
            reason: why.
            failed: whether no rank can continue; otherwise only ranks that still need this one cannot.
        """
        if self._own_words[LEFT]:
            return
        text = reason.encode()[:LONGEST_REASON]
        self._own.write_text(REASON, text)
        self._own_words[REASON_LENGTH] = len(text)
        self._own_words[LEFT] = _FAILED if failed else _DONE
        notify_all(self._event_counts, ANYTHING)

    def reason_of_leaver(self, awaited: Awaited) -> str | None:
        """Why a peer will not reach the awaited value, or has ended the group for all; None if none has left."""
        for peer in self.peers:
            segment = self.segments[peer]
            left = segment.words[LEFT]
            if left == _FAILED or (left == _DONE and peer in self.missing(awaited)):
                reason = segment.read_text(REASON, segment.words[REASON_LENGTH])
                return f"rank {self.ranks[peer]} has left {self.title}: {reason.decode(errors='replace')}"
        return None


_MOST_VIEWS = 512
_ALIGNMENT = 64  # bytes; a multiple of every dtype's size


class Rounds:
    """The position of this rank in the rounds of a group.

    In each round, every rank posts something in its slot, waits for the others, and takes what it needs. All ranks go
    through the same rounds in the same order; a collective takes as many as its size needs. A slot is used again
    `ROUND_SLOTS` rounds later, without asking whether the peers have taken its contents: a rank posts round r only
    after all have posted r - 2, and a rank that posts a round is done with the third before it.

    Attributes:
        part_bytes: bytes of a slot for each rank, where it holds a part for each.
    """

    def __init__(self, channel: SharedChannel) -> None:
        self.channel = channel
        self.rank, self.size, self.peers = channel.rank, channel.size, channel.peers
        self.part_bytes = SLOT_BYTES // self.size // _ALIGNMENT * _ALIGNMENT
        self._next = 0
        self._views: dict[Hashable, list[Tensor]] = {}
        self._addresses = [
            [segment.address + channel.layout.slot(number) for segment in channel.segments]
            for number in range(ROUND_SLOTS)
        ]
        self._slots = [
            [segment.tensor(channel.layout.slot(number), SLOT_BYTES) for segment in channel.segments]
            for number in range(ROUND_SLOTS)
        ]

    def reserve(self, number: int = 1) -> int:
        """Take the next rounds; returns the number of the first."""
        first = self._next
        self._next += number
        return first

    def address(self, index: int, round_number: int) -> int:
        """The address of a rank's slot in this process."""
        return self._addresses[round_number % ROUND_SLOTS][index]

    def views(
        self, round_number: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...], start: int = 0
    ) -> list[Tensor]:
        """The contents of every rank's slot from the byte `start` on, as tensors; do not change the list."""
        slot = round_number % ROUND_SLOTS
        key = (slot, dtype, shape, start)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            views = self._views[key] = self._make_views(slot, dtype, shape, start)
        return views

    def meet(self, signature: int, tensor: Tensor | None = None) -> Generator[Awaited, None, int]:
        """Go through one round; returns its number.

        Args:
            signature: the signature of the collective, the same on every rank.
            tensor: the contiguous tensor to post; None if this rank has nothing for the others.
        """
        round_number = self.reserve()
        if tensor is not None:
            copy_bytes(self.address(self.rank, round_number), tensor.data_ptr(), tensor.nbytes)
        self.post(round_number, signature)
        yield from self.all_posted(round_number, signature)
        return round_number

    def post(self, round_number: int, signature: int) -> None:
        """Show this rank's slot and signature to the others."""
        self.channel.set_own(SIGNATURES + round_number % ROUND_SLOTS, signature)
        self.channel.publish(POSTED, round_number + 1)

    def all_posted(self, round_number: int, signature: int) -> Generator[Awaited, None, None]:
        """Wait until every rank has posted."""
        channel = self.channel
        if channel.behind(POSTED, round_number + 1):
            yield Awaited(POSTED, round_number + 1, self.peers)
        word = SIGNATURES + round_number % ROUND_SLOTS
        for peer in self.peers:
            if channel.read(peer, word) != signature:
                raise self._mismatch(word)

    def publish_reduced(self, round_number: int) -> None:
        """Show the part that this rank has reduced to the others."""
        self.channel.publish(REDUCED, round_number + 1)

    def all_reduced(self, round_number: int) -> Generator[Awaited, None, None]:
        """Wait until every rank has reduced its part."""
        if self.channel.behind(REDUCED, round_number + 1):
            yield Awaited(REDUCED, round_number + 1, self.peers)

    def _make_views(
        self, slot: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...], start: int
    ) -> list[Tensor]:
        end = start + dtype.itemsize * torch.Size(shape).numel()
        with torch.inference_mode(False):
            return [whole[start:end].view(dtype).view(shape) for whole in self._slots[slot]]

    def _mismatch(self, word: int) -> SharedMemoryError:
        ranks = self.channel.ranks
        lines = [
            f"  rank {ranks[index]}: {describe_signature(self.channel.read(index, word))}" for index in range(self.size)
        ]
        return SharedMemoryError(
            f"ranks of {self.channel.title} reached different collectives:\n" + "\n".join(lines) + "\n"
            "NXD_DEBUG_COLLECTIVES=1 also names the lines"
        )


class Outbox:
    """Messages from this rank to one other, cut into chunks that pass through the slots between the two.

    The sender counts chunks sent, the receiver chunks received; each slot's signature describes the message.
    """

    def __init__(self, channel: SharedChannel, peer: int) -> None:
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
        signature = encode_signature("send to recv", tensor.numel(), tensor.dtype)
        address, size = tensor.data_ptr(), tensor.nbytes
        piece = piece_of(size, channel.layout.message_slot_bytes)
        for start in range(0, max(1, size), piece):
            chunk = self._sent
            received = chunk - MESSAGE_SLOTS + 1
            if channel.read(peer, self._received_word) < received:
                yield Awaited(self._received_word, received, (peer,))
            slot = chunk % MESSAGE_SLOTS
            copy_bytes(self._slots[slot], address + start, min(size - start, piece))
            channel.set_own(self._sent_word + 1 + slot, signature)
            self._sent += 1
            channel.publish_to(peer, self._sent_word, self._sent)
        return tensor


class Inbox:
    """Messages from one other rank to this one."""

    def __init__(self, channel: SharedChannel, peer: int) -> None:
        self._channel, self._peer = channel, peer
        self._sent_word = channel.layout.sent(channel.rank)  # of the peer
        self._received_word = channel.layout.received(peer)
        self._slots = [
            channel.segments[peer].address + channel.layout.message_slot(channel.rank, chunk)
            for chunk in range(MESSAGE_SLOTS)
        ]
        self._received = 0

    def receive(self, tensor: Tensor) -> Steps:
        """Receive into a contiguous tensor."""
        channel, peer = self._channel, self._peer
        signature = encode_signature("send to recv", tensor.numel(), tensor.dtype)
        address, size = tensor.data_ptr(), tensor.nbytes
        piece = piece_of(size, channel.layout.message_slot_bytes)
        for start in range(0, max(1, size), piece):
            chunk = self._received
            if channel.read(peer, self._sent_word) <= chunk:
                yield Awaited(self._sent_word, chunk + 1, (peer,))
            slot = chunk % MESSAGE_SLOTS
            sent = channel.read(peer, self._sent_word + 1 + slot)
            if sent != signature:
                raise SharedMemoryError(self._mismatch(sent, signature))
            copy_bytes(address + start, self._slots[slot], min(size - start, piece))
            self._received += 1
            channel.publish_to(peer, self._received_word, self._received)
        return tensor

    def _mismatch(self, sent: int, expected: int) -> str:
        channel = self._channel
        return (
            f"ranks of {channel.title} disagree about a message: rank {channel.ranks[self._peer]} sent "
            f"{describe_signature(sent)}, rank {channel.ranks[channel.rank]} receives {describe_signature(expected)}"
        )
