"""Compares each tensor of a candidate with the reference's, in the order of execution, one at a time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity.activations import (
    ActivationPlaces,
    data_problem,
    exact,
    groups_of,
    joined,
    nearest,
    rows_of,
    scale_of,
    without_repeated_bias,
)
from nxd_parity.bounds import Bound, Distance, bound_of, distance
from nxd_parity.events import TensorEvent
from nxd_parity.parameters import ParameterPlaces
from nxd_parity.places import Place, whole_place
from nxd_parity.recording import Recording
from nxd_parity.sequence import Key, by_key, execution_order


class Status(Enum):
    """How a tensor compares."""

    AGREES = "agrees"
    SUM = "ranks have parts of a sum"
    DIFFERS = "differs"
    UNKNOWN = "not compared"


@dataclass(frozen=True)
class Piece:
    """A rank's tensor, and the part of the whole that it should be.

    Attributes:
        rank: the candidate's rank.
        event: what was recorded.
        place: its place; None if there is none.
        scale: the factor that a gradient of an activation has on this rank, as where a loss is a mean over its rows.
    """

    rank: int
    event: TensorEvent
    place: Place | None
    scale: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a tensor of the candidate compares.

    Attributes:
        key: what the tensor is.
        status: the result.
        pieces: all ranks' tensors.
        differing: those that differ.
        apart: how far the first of those differs.
        summed_over: the ranks whose parts add up.
        reason: why it was not compared.
    """

    key: Key
    status: Status
    pieces: tuple[Piece, ...] = ()
    differing: tuple[Piece, ...] = ()
    apart: Distance | None = None
    summed_over: tuple[int, ...] = ()
    reason: str = ""


class Comparison:
    """Two recordings, side by side."""

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        spread: Sequence[Recording] = (),
        *,
        rtol: float | None = None,
        shards: dict[str, int] | None = None,
    ) -> None:
        """Index both; see `compare`."""
        self.reference, self.candidate, self.spread, self._rtol = reference, candidate, spread, rtol
        self.of_reference = by_key(reference.tensors[0])
        self.of_spread = [by_key(it.tensors[0]) for it in spread]
        self.of_candidate: dict[Key, list[tuple[int, TensorEvent]]] = defaultdict(list)
        for rank, tensors in enumerate(candidate.tensors):
            for key, found in by_key(tensors).items():
                self.of_candidate[key] += [(rank, it) for it in found]
        last = min(max((it.step for it in found), default=0) for found in (reference.tensors[0], candidate.tensors[0]))
        self.order = [it for it in execution_order(reference.tensors[0]) if it.step <= last]
        self.steps = last
        self.parameters = ParameterPlaces(candidate.world_size, shards or {})
        self._activations = ActivationPlaces()
        self._scales: dict[tuple[int, int, int], float] = {}
        self._peers: dict[tuple[int, str], float] = defaultdict(float)
        for event in reference.tensors[0]:
            size = event.largest if event.largest == event.largest else 0.0
            self._peers[event.step, event.kind] = max(self._peers[event.step, event.kind], size)
        known = {it.ranks for of_rank in candidate.collectives for it in of_rank}
        self.groups = list(groups_of(candidate.world_size, sorted(known)))

    def outcomes(self) -> Iterator[Outcome]:
        """Compare all tensors, in the order of execution."""
        for key in self.order:
            found = self.of_candidate.get(key)
            if not found:
                yield Outcome(key, Status.UNKNOWN, reason="is on no rank of the candidate")
            elif key.kind in (events.ACTIVATION, events.INPUT, events.ACTIVATION_GRADIENT):
                yield self._activation(key, found)
            elif key.kind == events.LOSS:
                yield self._loss(key, found)
            else:
                yield self._parameter(key, found)

    def whole(self, key: Key) -> Tensor:
        """Return the reference's tensor; several calls of a module in a step are joined."""
        return _read_joined(self.reference, 0, tuple(self.of_reference[key]))

    def read(self, piece: Piece) -> Tensor:
        """Return a rank's tensor, without padding."""
        value = self.candidate.read(piece.rank, piece.event)
        return value if piece.place is None else piece.place.without_padding(value)

    def expected(self, piece: Piece, key: Key) -> Tensor:
        """Return what a rank's tensor should be."""
        assert piece.place is not None
        part = piece.place.of(self.whole(key))
        return part if piece.scale == 1 else part * piece.scale

    def bound(self, key: Key, piece: Piece) -> Bound:
        """Return how far a rank's tensor may be from what it should be."""
        assert piece.place is not None
        part = piece.place.of(self.whole(key))
        spread = [
            piece.place.of(_read_joined(recording, 0, tuple(of_key[key])))
            for recording, of_key in zip(self.spread, self.of_spread, strict=True)
            if key in of_key
        ]
        bound = bound_of(part, spread, peers=self._peers[key.step, key.kind], rtol=self._rtol)
        return Bound(bound.largest * abs(piece.scale), bound.mean_square * abs(piece.scale))

    def _parameter(self, key: Key, found: Sequence[tuple[int, TensorEvent]]) -> Outcome:
        whole = self.whole(key)
        if key.kind == events.PARAMETER and key.step == 0:
            values = {rank: self.candidate.read(rank, event) for rank, event in found}
            self.parameters.learn(key.name, whole, values, dict(found))
        pieces = tuple(
            Piece(rank, event, self.parameters.place(key.name, rank, event, tuple(whole.shape)))
            for rank, event in found
        )
        return self._judged(key, pieces)

    def _activation(self, key: Key, found: Sequence[tuple[int, TensorEvent]]) -> Outcome:
        whole = self.whole(key)
        is_gradient = key.kind == events.ACTIVATION_GRADIENT
        pieces = []
        for rank, event in found:
            local = self.candidate.read(rank, event)
            options = self._activations.options(rank, event, tuple(whole.shape))
            place = self._activations.remembered(rank, event) if is_gradient else None
            if place is None or (event.placement is not None and event.placement.summed_over):
                place = exact(options, whole, local) or rows_of(whole, local) or nearest(options, whole, local)
            if place is not None and not is_gradient:
                self._activations.remember(rank, event, place)
            if place is not None and key.kind == events.INPUT and torch.equal(place.of(whole), local):
                self._activations.learn(rank, event, place)
            piece = Piece(rank, event, place)
            if is_gradient and place is not None and not place.summed_over:
                piece = replace(piece, scale=self._scale(key, piece, local))
            pieces.append(piece)
        if key.kind == events.INPUT and not whole.dtype.is_floating_point:
            problem = data_problem([it.place for it in pieces], tuple(whole.shape))
            if problem:
                return Outcome(key, Status.DIFFERS, tuple(pieces), tuple(pieces), reason=problem)
        return self._judged(key, tuple(pieces))

    def _scale(self, key: Key, piece: Piece, local: Tensor) -> float:
        """Return the factor of a rank's gradients of activations: that of the first in backward."""
        known = (key.step, piece.rank, piece.event.model_call)
        if known not in self._scales:
            assert piece.place is not None
            part = piece.place.of(self.whole(key))
            factor, rest = scale_of(part, local) if part.shape == local.shape else (1.0, float("inf"))
            bound = self.bound(key, piece)
            size = float(part.double().abs().max()) if part.numel() else 0.0
            fits = size > 0 and rest * abs(factor) * size <= max(bound.largest * abs(factor), 1e-12 * size)
            self._scales[known] = factor if fits and factor > 0 else 1.0
        return self._scales[known]

    def scales(self, step: int) -> dict[tuple[int, int], float]:
        """Return the factors of a step's gradients of activations, by rank and call of the model."""
        return {(rank, call): it for (of_step, rank, call), it in self._scales.items() if of_step == step}

    def _loss(self, key: Key, found: Sequence[tuple[int, TensorEvent]]) -> Outcome:
        """A step's loss is the sum of its backwards, and the mean over the ranks that have one."""
        wanted = torch.stack([self.reference.read(0, it).double().reshape(()) for it in self.of_reference[key]]).sum()
        of_rank: dict[int, float] = defaultdict(float)
        for rank, event in found:
            of_rank[rank] += float(self.candidate.read(rank, event))
        mean = torch.tensor(sum(of_rank.values()) / len(of_rank), dtype=torch.float64)
        # Some programs divide the loss by the number of backwards themselves, others let the backwards add up.
        counts = {1, len(self.of_reference[key]), len(found) // len(of_rank)}
        apart = min((distance(wanted, mean / count) for count in counts), key=lambda it: it.largest)
        piece = Piece(found[0][0], found[0][1], whole_place(()))
        spread = [
            torch.stack([rec.read(0, it).double().reshape(()) for it in of_key[key]]).sum()
            for rec, of_key in zip(self.spread, self.of_spread, strict=True)
            if key in of_key
        ]
        dtype = self.of_reference[key][0].dtype
        bound = bound_of(wanted if spread else wanted.to(dtype), spread, peers=0.0, rtol=self._rtol)
        if bound.holds(apart):
            return Outcome(key, Status.AGREES, (piece,))
        return Outcome(key, Status.DIFFERS, (piece,), (piece,), apart)

    def _judged(self, key: Key, pieces: tuple[Piece, ...]) -> Outcome:
        summed = self._stated_sums(key, pieces)
        if summed is not None:
            return summed
        homeless = [it for it in pieces if it.place is None]
        if homeless:
            shape, whole = list(homeless[0].event.shape), list(self.whole(key).shape)
            reason = f"{shape} on rank {homeless[0].rank} is no part of {whole}"
            if key.kind in (events.ACTIVATION, events.INPUT, events.ACTIVATION_GRADIENT):
                return Outcome(key, Status.UNKNOWN, pieces, reason=reason)
            return Outcome(key, Status.DIFFERS, pieces, tuple(homeless), reason=reason)
        differing, apart = [], None
        for piece in pieces:
            found = self._difference(key, piece)
            if found is not None:
                differing.append(piece)
                apart = apart or found
        if not differing:
            return Outcome(key, Status.AGREES, pieces)
        outcome = Outcome(key, Status.DIFFERS, pieces, tuple(differing), apart)
        group = self.ranks_that_add_up(outcome)
        return outcome if group is None else replace(outcome, status=Status.SUM, summed_over=group)

    def _difference(self, key: Key, piece: Piece) -> Distance | None:
        same = self.of_reference[key]
        if len(same) == 1 and same[0].digest == piece.event.digest and piece.scale == 1:
            return None
        expected, found = self.expected(piece, key), self.read(piece)
        if expected.shape != found.shape:
            return Distance(float("inf"), float("inf"), float("inf"), (), 0.0, 0.0)
        apart = distance(expected, found)
        return None if self.bound(key, piece).holds(apart) else apart

    def _stated_sums(self, key: Key, pieces: tuple[Piece, ...]) -> Outcome | None:
        """Add up the ranks' parts where the program says that they are parts of a sum (DTensor's Partial)."""
        if not pieces or any(it.place is None or not it.place.summed_over for it in pieces):
            return None
        by_rank = {(it.rank, it.event.call): it for it in pieces}
        differing, apart = [], None
        for piece in pieces:
            assert piece.place is not None
            group = [by_rank.get((rank, piece.event.call)) for rank in piece.place.summed_over]
            if any(it is None for it in group):
                return Outcome(key, Status.UNKNOWN, pieces, reason="a rank lacks its part of a sum")
            total = torch.stack([self.read(it) for it in group if it is not None]).double().sum(0)
            expected = piece.place.of(self.whole(key))
            factor = self._scales.get((key.step, piece.rank, piece.event.model_call), 1.0)
            factor = factor if key.kind == events.ACTIVATION_GRADIENT else 1.0
            found = distance(expected * factor, total.to(expected.dtype))
            if not self.bound(key, replace(piece, scale=factor)).holds(found):
                differing.append(piece)
                apart = apart or found
        status = Status.DIFFERS if differing else Status.AGREES
        return Outcome(key, status, pieces, tuple(differing), apart)

    def ranks_that_add_up(self, outcome: Outcome) -> tuple[int, ...] | None:
        """Return the ranks whose tensors, added up or averaged, are the expected one; None if there are none."""
        by_call: dict[tuple[int, int], Piece] = {(it.rank, it.event.call): it for it in outcome.pieces}
        piece = outcome.differing[0]
        if piece.place is None:
            return None
        for group in self.groups:
            if piece.rank not in group:
                continue
            parts = [by_call.get((rank, piece.event.call)) for rank in group]
            if any(it is None or it.event.shape != piece.event.shape for it in parts):
                continue
            total = torch.stack([self.read(it) for it in parts if it is not None]).double().sum(0)
            for place in self._places_for_sum(outcome.key, piece):
                expected = place.of(self.whole(outcome.key)) * piece.scale
                if expected.shape != total.shape:
                    continue
                bound = self.bound(outcome.key, replace(piece, place=place))
                bound = Bound(bound.largest * len(group), bound.mean_square * len(group))
                for part in (total, total / len(group), without_repeated_bias(total, expected)):
                    if bound.holds(distance(expected, part.to(expected.dtype))):
                        return group
        return None

    def _places_for_sum(self, key: Key, piece: Piece) -> list[Place]:
        assert piece.place is not None
        if key.kind not in (events.ACTIVATION, events.INPUT):
            return [piece.place]
        return self._activations.options(piece.rank, piece.event, tuple(self.whole(key).shape)) or [piece.place]


@lru_cache(maxsize=8)
def _read_joined(recording: Recording, rank: int, calls: tuple[TensorEvent, ...]) -> Tensor:
    return joined([recording.read(rank, it) for it in calls])
