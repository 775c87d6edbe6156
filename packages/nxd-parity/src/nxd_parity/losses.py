"""Losses of two recordings: what they are made of, and how far apart they may be."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import torch

from nxd_parity import events
from nxd_parity.bounds import PRECISE, TIMES_SPREAD, TOLERANCES, Bound, distance
from nxd_parity.events import TensorEvent
from nxd_parity.outcome import Outcome, Piece, Status
from nxd_parity.places import whole_place
from nxd_parity.recording import Recording
from nxd_parity.sequence import Key
from nxd_parity.sides import Sides


class Losses(Sides):
    """Compares losses."""

    def loss(self, key: Key, found: Sequence[tuple[int, TensorEvent]]) -> Outcome:
        """A step's loss is the sum of its backwards, and the mean over the ranks that have one."""
        wanted = torch.tensor(self._sum_of_losses(self.reference, self.of_reference[key]), dtype=torch.float64)
        of_rank: dict[int, float] = defaultdict(float)
        for rank, event in found:
            of_rank[rank] += float(self.candidate.read(rank, event))
        total = torch.tensor(sum(of_rank.values()), dtype=torch.float64)
        # Programs divide a loss by the ranks, or by the backwards, or let them add up; gradients tell which is right.
        counts = {ranks * calls for ranks in self._sizes(len(of_rank)) for calls in {1, len(found) // len(of_rank)}}
        apart = min((distance(wanted, total / count) for count in sorted(counts)), key=lambda it: it.largest)
        piece = Piece(found[0][0], found[0][1], whole_place(()))
        if self.rounding_of_loss(key, float(wanted)).holds(apart):
            return Outcome(key, Status.AGREES, (piece,))
        return Outcome(key, Status.DIFFERS, (piece,), (piece,), apart)

    @cached_property
    def _rounding_of_losses(self) -> float:
        """The relative difference of losses that is rounding: numbers have too little spread each, so all of them."""
        of_loss = [key for key in self.order if key.kind == events.LOSS]
        fixed = TOLERANCES.get(self.dtype, 0.1) if self.rtol is None else self.rtol
        if not self.spread:
            return fixed
        spreads = [last_place(self.dtype) / 8]
        for key in of_loss:
            wanted = self._sum_of_losses(self.reference, self.of_reference[key])
            for recording, of_key in zip(self.spread, self.of_spread, strict=True):
                if key in of_key and wanted:
                    spreads.append(abs(self._sum_of_losses(recording, of_key[key]) - wanted) / abs(wanted))
        return max(TIMES_SPREAD * max(spreads), fixed if self.dtype in PRECISE else 0.0)

    def _sum_of_losses(self, recording: Recording, calls: Sequence[TensorEvent]) -> float:
        return sum(float(recording.read(0, it)) for it in calls)

    def _sizes(self, ranks: int) -> set[int]:
        return {1, ranks, *(len(it) for it in self.groups if len(it) <= ranks)}

    def rounding_of_loss(self, key: Key, expected: float) -> Bound:
        """Return how far a step's loss may be from what it should be.

        After the first step, Adam has moved parameters by rounding, and a sum and its division round the loss by
        half a unit each, on both sides.
        """
        dtype = self.of_reference[key][-1].dtype
        is_rounded = key.step > 1 and self.is_of_adam and bool(self.spread) and dtype not in PRECISE
        largest = max(self._rounding_of_losses, 2 * last_place(dtype) if is_rounded else 0.0) * abs(expected)
        return Bound(largest, largest)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The least precise dtype of the reference's activations, or of all its numbers if it recorded none."""
        numbers = [it for it in self.reference.tensors[0] if it.dtype.is_floating_point]
        activations = [it.dtype for it in numbers if it.kind == events.ACTIVATION]
        return max(activations or [it.dtype for it in numbers] or [torch.float64], key=last_place)


def last_place(dtype: torch.dtype) -> float:
    """Return how far apart the numbers of a dtype are at 1."""
    return torch.finfo(dtype).eps
