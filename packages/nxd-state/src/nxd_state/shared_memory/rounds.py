"""The rounds of a group: in each, every rank posts something in its slot, waits for the others, takes what it needs.

All ranks go through the same rounds in the same order; a collective takes as many as its size needs. A slot is used
again once every peer has taken what was in it, `ROUND_SLOTS` rounds later.
"""

from collections.abc import Generator, Hashable

import torch
from torch import Tensor

from nxd_state.shared_memory import layout, signature
from nxd_state.shared_memory.channel import Awaited, Channel, SharedMemoryError
from nxd_state.shared_memory.layout import ROUND_SLOTS, SLOT_BYTES

_MOST_VIEWS = 512
_ALIGNMENT = 64  # bytes; a multiple of every dtype's size


class Rounds:
    """Where this rank is in the rounds of a group."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.size, self.peers = channel.rank, channel.size, channel.peers
        self._next = 0
        self._views: dict[Hashable, list[Tensor]] = {}
        self._slots = [
            [segment.tensor(channel.layout.slot(number), SLOT_BYTES) for segment in channel.segments]
            for number in range(ROUND_SLOTS)
        ]

    def reserve(self, number: int = 1) -> int:
        """The first of that many next rounds."""
        first = self._next
        self._next += number
        return first

    def address(self, index: int, round_number: int) -> int:
        """Where the slot of a rank begins in this process."""
        return self.channel.segments[index].address + self.channel.layout.slot(round_number)

    def part_bytes(self) -> int:
        """How much of a slot there is for each rank, where it holds something for each."""
        return SLOT_BYTES // self.size // _ALIGNMENT * _ALIGNMENT

    def views(self, round_number: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> list[Tensor]:
        """The beginning of every rank's slot as a tensor."""
        slot = round_number % ROUND_SLOTS
        key = (slot, dtype, shape)
        views = self._views.get(key)
        if views is None:
            views = self._make_views(slot, dtype, shape)
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = views
        return views

    def parts(self, round_number: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> list[Tensor]:
        """`views` of a stack of one part per rank, of which each gives the one for this rank."""
        slot = round_number % ROUND_SLOTS
        key = (slot, dtype, shape, "parts")
        parts = self._views.get(key)
        if parts is None:
            parts = self._views[key] = [view[self.rank] for view in self.views(round_number, dtype, shape)]
        return parts

    def free(self, round_number: int) -> Generator[Awaited, None, None]:
        """Wait until the slot of a round may be written."""
        taken = round_number - ROUND_SLOTS + 1
        while taken > 0 and self.channel.behind(layout.TAKEN, taken):
            yield Awaited(layout.TAKEN, taken, self.peers)

    def post(self, round_number: int, what: int) -> None:
        """Let the others see this rank's slot, and what it is doing (see `signature`)."""
        self.channel.set_own(layout.SIGNATURES + round_number % ROUND_SLOTS, what)
        self.channel.publish(layout.POSTED, round_number + 1)

    def all_posted(self, round_number: int, what: int) -> Generator[Awaited, None, None]:
        """Wait until every rank has posted.

        Raises:
            SharedMemoryError: a rank is doing something else.
        """
        channel = self.channel
        while channel.behind(layout.POSTED, round_number + 1):
            yield Awaited(layout.POSTED, round_number + 1, self.peers)
        word = layout.SIGNATURES + round_number % ROUND_SLOTS
        for peer in self.peers:
            if channel.read(peer, word) != what:
                raise self._mismatch(word)

    def publish_reduced(self, round_number: int) -> None:
        """Let the others see what this rank has reduced."""
        self.channel.publish(layout.REDUCED, round_number + 1)

    def all_reduced(self, round_number: int) -> Generator[Awaited, None, None]:
        """Wait until every rank has reduced its part."""
        while self.channel.behind(layout.REDUCED, round_number + 1):
            yield Awaited(layout.REDUCED, round_number + 1, self.peers)

    def take(self, round_number: int) -> None:
        """Say that this rank needs nothing of that round any more."""
        self.channel.publish(layout.TAKEN, round_number + 1)

    def _make_views(self, slot: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> list[Tensor]:
        size = dtype.itemsize * torch.Size(shape).numel()
        with torch.inference_mode(False):
            return [whole[:size].view(dtype).view(shape) for whole in self._slots[slot]]

    def _mismatch(self, word: int) -> SharedMemoryError:
        ranks = self.channel.ranks
        lines = [
            f"  rank {ranks[index]}: {signature.describe(self.channel.read(index, word))}" for index in range(self.size)
        ]
        return SharedMemoryError(
            f"ranks of {self.channel.title} came to different collectives:\n" + "\n".join(lines) + "\n"
            "NXD_DEBUG_COLLECTIVES=1 also names the lines"
        )
