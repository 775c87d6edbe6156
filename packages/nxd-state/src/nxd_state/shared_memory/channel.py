"""`Channel`: the memory that the ranks of one group share, as seen from one of them, and what they know of each other.

Each rank writes its own segment and reads those of the others. What is written where is in `layout`; what the words
count, in `rounds` and `messages`.
"""

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nxd_state.shared_memory import layout
from nxd_state.shared_memory.doorbell import ANYTHING, RemoteDoorbell, ring_all
from nxd_state.shared_memory.host import Process
from nxd_state.shared_memory.layout import Layout
from nxd_state.shared_memory.segment import Segment
from nxd_state.store_messages import PeerError

_DONE, _FAILED = 1, 2  # how a rank has left
_GROUP_AT, _RANK_AT = 24, 16  # bits of a code at the doorbell: group (32), rank (8), word (16)


class Awaited(NamedTuple):
    """That the word of each of some peers has come to a value."""

    word: int
    value: int
    peers: Sequence[int]


# A collective or message in steps: it yields what it cannot go on without, and returns its result.
Steps = Generator[Awaited, None, Tensor]


class SharedMemoryError(RuntimeError):
    """A collective through shared memory cannot be completed."""


class LostPeerError(SharedMemoryError, PeerError):
    """A rank that has ended, failed or not come in time is needed to complete it."""


@dataclass(frozen=True)
class Neighbour:
    """Another rank of the group."""

    process: Process
    segment: Segment
    doorbell: RemoteDoorbell


class Channel:
    """The memory that one group shares.

    Args:
        title: the group, as errors name it.
        ranks: global ranks of the group.
        rank: this one's index.
        own: this rank's segment.
        neighbours: the others, by index.
        timeout: seconds that a collective may wait for a peer.
    """

    def __init__(
        self,
        title: str,
        ranks: tuple[int, ...],
        rank: int,
        own: Segment,
        neighbours: dict[int, Neighbour],
        timeout: float,
    ) -> None:
        self.title, self.ranks, self.rank, self.timeout = title, ranks, rank, timeout
        self.size = len(ranks)
        self.layout = Layout(self.size)
        self.peers = tuple(neighbours)
        self.segments = [neighbours[index].segment if index in neighbours else own for index in range(self.size)]
        self.error: BaseException | None = None
        self._code = self._code_of(rank)
        self._own_words = own.words
        self._own = own
        self._words = [segment.words for segment in self.segments]
        self._peer_words = [neighbour.segment.words for neighbour in neighbours.values()]
        self._neighbours = neighbours
        self._doorbells = [neighbour.doorbell for neighbour in neighbours.values()]

    @property
    def bytes(self) -> int:
        """The most memory that all ranks' segments of this group may take together."""
        return self.size * self.layout.bytes

    def publish(self, word: int, value: int) -> None:
        """Set one of this rank's words that peers may wait for."""
        self._own_words[word] = value
        ring_all(self._doorbells, self._code | word)

    def publish_to(self, peer: int, word: int, value: int) -> None:
        """Set one of this rank's words that only `peer` may wait for."""
        self._own_words[word] = value
        ring_all((self._neighbours[peer].doorbell,), self._code | word)

    def behind(self, word: int, value: int) -> bool:
        """Whether the word of some peer has not come to `value`."""
        for words in self._peer_words:  # noqa: SIM110 - any() with a generator takes twice as long
            if words[word] < value:
                return True
        return False

    def lacks(self, awaited: Awaited) -> bool:
        """Whether some peer has not come to what is awaited."""
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
        """What to expect at the doorbell: the word of the first that is missing; None if nobody is."""
        missing = self.missing(awaited)
        return self._code_of(missing[0]) | awaited.word if missing else None

    def _code_of(self, index: int) -> int:
        return zlib.crc32(self.title.encode()) << _GROUP_AT | (index + 1) << _RANK_AT

    def process(self, peer: int) -> Process:
        """That of another rank."""
        return self._neighbours[peer].process

    def leave(self, reason: str, *, failed: bool) -> None:
        """Tell the peers that this rank no longer takes part in anything; the first reason stays.

        What has been published stays readable.

        Args:
            reason: why.
            failed: whether no rank can continue; otherwise only ranks that need something more of this one cannot.
        """
        if self._own_words[layout.LEFT]:
            return
        text = reason.encode()[: layout.LONGEST_REASON]
        self._own.write_text(layout.REASON, text)
        self._own_words[layout.REASON_LENGTH] = len(text)
        self._own_words[layout.LEFT] = _FAILED if failed else _DONE
        ring_all(self._doorbells, ANYTHING)

    def reason_of_leaver(self, awaited: Awaited) -> str | None:
        """Why a peer will not come to what is awaited, or has ended the group for all; None if none has left so."""
        for peer in self.peers:
            segment = self.segments[peer]
            left = segment.words[layout.LEFT]
            if left == _FAILED or (left == _DONE and peer in self.missing(awaited)):
                reason = segment.read_text(layout.REASON, segment.words[layout.REASON_LENGTH])
                return f"rank {self.ranks[peer]} is gone from {self.title}: {reason.decode(errors='replace')}"
        return None
