"""The rounds of a group: in each, every rank posts something in its slot, waits for the others, takes what it needs.

All ranks go through the same rounds in the same order; a collective takes as many as its size needs. A slot is used
again `ROUND_SLOTS` rounds later, without asking whether the peers have taken what was in it: a rank posts round r only
after all have posted r - 2, and whoever posts a round is done with the third before it.
"""

from collections.abc import Generator, Hashable

import torch
from torch import Tensor

from nxd_state.shared_memory import layout, signature
from nxd_state.shared_memory.channel import Awaited, Channel, SharedMemoryError
from nxd_state.shared_memory.copying import copy_bytes
from nxd_state.shared_memory.layout import ROUND_SLOTS, SLOT_BYTES

_MOST_VIEWS = 512
_ALIGNMENT = 64  # bytes; a multiple of every dtype's size


class Rounds:
    """Where this rank is in the rounds of a group.

    Attributes:
        part_bytes: how much of a slot there is for each rank, where it holds something for each.
    """

    def __init__(self, channel: Channel) -> None:
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
        """The first of that many next rounds."""
        first = self._next
        self._next += number
        return first

    def address(self, index: int, round_number: int) -> int:
        """Where the slot of a rank begins in this process."""
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

    def meet(self, what: int, tensor: Tensor | None = None) -> Generator[Awaited, None, int]:
        """Go through one round; returns which it was.

        Args:
            what: the signature.
            tensor: contiguous, what to post; None where this rank has nothing for the others.
        """
        this = self.reserve()
        if tensor is not None:
            copy_bytes(self.address(self.rank, this), tensor.data_ptr(), tensor.nbytes)
        self.post(this, what)
        yield from self.all_posted(this, what)
        return this

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
        if channel.behind(layout.POSTED, round_number + 1):
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
        if self.channel.behind(layout.REDUCED, round_number + 1):
            yield Awaited(layout.REDUCED, round_number + 1, self.peers)

    def _make_views(
        self, slot: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...], start: int
    ) -> list[Tensor]:
        end = start + dtype.itemsize * torch.Size(shape).numel()
        with torch.inference_mode(False):
            return [whole[start:end].view(dtype).view(shape) for whole in self._slots[slot]]

    def _mismatch(self, word: int) -> SharedMemoryError:
        ranks = self.channel.ranks
        lines = [
            f"  rank {ranks[index]}: {signature.describe(self.channel.read(index, word))}" for index in range(self.size)
        ]
        return SharedMemoryError(
            f"ranks of {self.channel.title} came to different collectives:\n" + "\n".join(lines) + "\n"
            "NXD_DEBUG_COLLECTIVES=1 also names the lines"
        )
