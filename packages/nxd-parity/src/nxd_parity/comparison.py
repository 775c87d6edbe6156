"""Compares each tensor of a candidate with the reference's, in the order of execution, one at a time."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cached_property

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity.activations import (
    ActivationPlaces,
    data_problem,
    exact,
    nearest_rows,
    padded_rows,
    rows_of,
    scale_of,
    without_repeated_bias,
)
from nxd_parity.bounds import Bound, distance
from nxd_parity.events import TensorEvent
from nxd_parity.losses import Losses, last_place
from nxd_parity.outcome import Outcome, Piece, Status
from nxd_parity.parameters import ParameterPlaces
from nxd_parity.places import Place, nearest, not_covered, part_of_flat
from nxd_parity.recording import Recording
from nxd_parity.sequence import Key, owner_of
from nxd_parity.sides import OF_CALLS

MUCH_NEARER = 0.1  # a share of another distance
LEAST_CLIPPED, CLIPPED_ALIKE, CLIPPED_APART = 3, 1e-3, 0.1  # gradients of one factor; how near it is, and other ranks'


class Comparison(Losses):
    """Compares the tensors of two recordings."""

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        spread: Sequence[Recording] = (),
        *,
        rtol: float | None = None,
        shards: Mapping[str, int] | None = None,
    ) -> None:
        """Index both; see `compare`."""
        super().__init__(reference, candidate, spread, rtol)
        self.parameters = ParameterPlaces(candidate.world_size, shards or {})
        self._activations = ActivationPlaces(self.parameters)
        self._flat_states: set[tuple[int, str]] = set()
        self._scales: dict[tuple[int, int, int], float] = {}
        self._of_gradients: dict[Key, Outcome] = {}
        self.clipped: dict[int, Mapping[int, float]] = {}  # by step in which gradients differ, and rank

    def outcomes(self) -> Iterator[Outcome]:
        """Compare all tensors, in the order of execution."""
        for key in self.order:
            found = self.of_candidate.get(key)
            if not found:
                yield Outcome(key, Status.UNKNOWN, reason="is on no rank of the candidate")
            elif key.kind in OF_CALLS:
                yield self._activation(key, found)
            elif key.kind == events.LOSS and any(it.placement is None for _, it in found):
                yield self.loss(key, found)
            elif key.kind == events.GRADIENT:
                yield self._gradient(key)
            else:
                yield self._parameter(key, found)

    def _gradient(self, key: Key) -> Outcome:
        if key not in self._of_gradients:
            outcome = self._parameter(key, self.of_candidate[key])
            factors = {} if outcome.status is Status.AGREES else self._clipped_by(key.step)
            if factors:
                outcome = self._scaled(outcome, factors)
            self._of_gradients[key] = outcome
        return self._of_gradients[key]

    def _scaled(self, outcome: Outcome, factors: Mapping[int, float]) -> Outcome:
        """Compare a tensor with what it should be times a factor of each rank."""
        pieces = [replace(it, scale=factors.get(it.rank, 1.0) * it.scale) for it in outcome.pieces]
        return self.judged(outcome.key, tuple(pieces))

    def _clipped_by(self, step: int) -> Mapping[int, float]:
        """Return the factor that several gradients of a step have on each rank, where others are wrong in another way.

        A program that clips by its own code does so before gradients are recorded, and the wrong ones are part of its
        norm. No gradient is as expected then. There are none if that is not so.
        """
        if step not in self.clipped:
            self.clipped[step] = self._find_clipping(step)
        return self.clipped[step]

    def _find_clipping(self, step: int) -> Mapping[int, float]:
        recorded = [key for key in self.order if key.step == step and key in self.of_candidate]
        if any(it.kind == events.GRADIENT_NORM for it in recorded):
            return {}
        of_ranks: dict[int, list[float]] = defaultdict(list)
        outcomes, others = [], 0
        for key in recorded:
            size = self.of_reference[key][-1]
            if key.kind == events.GRADIENT and size.largest > 0 and math.prod(size.shape) > 1:
                outcome = self._parameter(key, self.of_candidate[key])
                if outcome.status is Status.AGREES:
                    return {}
                outcomes.append(outcome)
                for piece in outcome.pieces:
                    factor = None if piece.place is None else self._factor(key, piece, self.read(piece))
                    if factor is None:
                        others += 1
                    else:
                        of_ranks[piece.rank].append(factor)
        usual = _usual([it for found in of_ranks.values() for it in found], others)
        if usual is None:
            return {}
        factors = {rank: _usual(found, others) or usual for rank, found in of_ranks.items()}
        factors = {
            rank: it if math.isclose(it, usual, rel_tol=CLIPPED_APART) else usual for rank, it in factors.items()
        }
        are_all_alike = all(self._scaled(it, factors).status is Status.AGREES for it in outcomes)
        return {} if are_all_alike else factors

    def _parameter(self, key: Key, found: Sequence[tuple[int, TensorEvent]]) -> Outcome:
        whole = self.whole(key)
        is_stated = all(event.placement is not None for _, event in found)
        if key.kind == events.PARAMETER and key.step == 0 and is_stated:
            self.parameters.learn_stated(key.name, whole.shape, found)
        elif key.kind == events.PARAMETER and key.step == 0:
            values = {rank: self.candidate.read(rank, event) for rank, event in found}
            self.parameters.learn(key.name, whole, values, dict(found))
        last = {(rank, it.call): it for rank, it in found}  # a program may make the model again, as when it loads it
        pieces = []
        for (rank, _), event in last.items():
            place = self.parameters.place(key.name, rank, event, tuple(whole.shape))
            if key.kind == events.PARAMETER and (place is None or place.local_shape != event.shape):
                place = self.parameters.learn_again(key.name, rank, whole, self.candidate.read(rank, event))
            if place is None and key.kind == events.OPTIMIZER_STATE:
                place = self._part_of_flat_state(key, rank, event, whole)
            pieces.append(Piece(rank, event, place))
        return self.judged(key, tuple(pieces))

    def _part_of_flat_state(self, key: Key, rank: int, event: TensorEvent, whole: Tensor) -> Place | None:
        """Return the place of a state in equal parts in the order of ranks, padded at the end, if it was right once."""
        place = part_of_flat(tuple(whole.shape), event.shape, rank, self.candidate.world_size)
        if place is None:
            return None
        if self.difference(key, Piece(rank, event, place)) is None:
            self._flat_states.add((rank, key.name))
        return place if (rank, key.name) in self._flat_states else None

    def _activation(self, key: Key, found: Sequence[tuple[int, TensorEvent]]) -> Outcome:
        pieces = tuple(self._placed(key, rank, event) for rank, event in found)
        whole = self.whole(key)
        if key.kind == events.INPUT and not whole.dtype.is_floating_point:
            of_data = [it.place for it in pieces if not it.event.dtype.is_floating_point]
            problem = data_problem(of_data, tuple(whole.shape))
            if problem:
                return Outcome(key, Status.DIFFERS, pieces, pieces, reason=problem)
        return self.judged(key, pieces)

    def _placed(self, key: Key, rank: int, event: TensorEvent) -> Piece:
        """Find the part of an activation, or of its gradient, that a rank has, and learn from it."""
        whole, local = self.whole(key), self.candidate.read(rank, event)
        is_gradient = key.kind == events.ACTIVATION_GRADIENT
        place = self._nearest_place(key, rank, event, local)
        if place is None or not place.fits(whole, local):
            return Piece(rank, event, None)
        piece = Piece(rank, event, place)
        if is_gradient:
            return piece if place.summed_over else replace(piece, scale=self._scale(key, piece, local))
        self._activations.remember(rank, event, place)
        if key.kind == events.INPUT and torch.equal(place.of(whole), local):
            self._activations.learn(rank, event, place)
        return piece

    def _nearest_place(self, key: Key, rank: int, event: TensorEvent, local: Tensor) -> Place | None:
        whole = self.whole(key)
        is_gradient = key.kind == events.ACTIVATION_GRADIENT
        place = self._activations.remembered(rank, event) if is_gradient else None
        if place is not None and not place.fits(whole, local):
            place = None
        if place is None or (event.placement is not None and event.placement.summed_over):
            options = self._activations.options(rank, event, tuple(whole.shape))
            place = exact(options, whole, local) or rows_of(whole, local)
            if place is None and key.kind == events.INPUT and not whole.dtype.is_floating_point:
                place = padded_rows(whole, local)
            place = place or nearest(options, whole, local)
        if place is not None and self._is_near(key, Piece(rank, event, place), local):
            return place
        scale = self._scales.get((key.step, rank, event.model_call), 1.0) if is_gradient else 1.0
        rows = nearest_rows(whole, local / scale, once=not is_gradient)
        if rows is not None and (place is None or self._is_near(key, Piece(rank, event, rows), local)):
            return rows
        return place if is_gradient else self._place_of_wrong(rank, event, place, local, whole)

    def _place_of_wrong(
        self, rank: int, event: TensorEvent, place: Place | None, local: Tensor, whole: Tensor
    ) -> Place | None:
        """Return the place of values that are near to those of no place: the inputs' unless another is much nearer."""
        of_inputs = self._activations.of_inputs(rank, event, tuple(whole.shape))
        if place is None or of_inputs is None or not of_inputs.fits(whole, local):
            return place
        apart = [distance(it.of(whole), local).mean_square for it in (place, of_inputs)]
        return place if apart[0] < MUCH_NEARER * apart[1] else of_inputs

    def _is_near(self, key: Key, piece: Piece, local: Tensor) -> bool:
        place = piece.place
        if place is None or place.summed_over or place.shape != tuple(self.whole(key).shape):
            return True
        if key.kind == events.ACTIVATION_GRADIENT:
            piece = replace(piece, scale=self._scale(key, piece, local))
        return self.difference(key, piece) is None

    def _scale(self, key: Key, piece: Piece, local: Tensor) -> float:
        """Return the factor of a rank's gradients of activations.

        It is that of the first module in backward whose parameters have right gradients, else that of the first module.
        """
        known = (key.step, piece.rank, piece.event.model_call)
        if known not in self._scales:
            of_right = (self._factor(*it) for it in self._of_right_gradients(*known))
            found = next((it for it in of_right if it is not None), None) or self._factor(key, piece, local)
            self._scales[known] = 1.0 if found is None else found
        return self._scales[known]

    def place_of_activation(self, rank: int, event: TensorEvent) -> Place | None:
        """Return the place of a rank's activation, or of the one whose gradient a tensor is, once it was compared."""
        return self._activations.remembered(rank, event)

    def have_other_counts(self, step: int) -> bool:
        """Whether the gradients of activations have different factors: of means over different numbers of rows."""
        scales = [it for (of_step, _, _), it in self._scales.items() if of_step == step]
        rounding = max(4 * last_place(self.dtype), 1e-6)
        return bool(scales) and max(scales) - min(scales) > rounding * max(scales)

    def _of_right_gradients(self, step: int, rank: int, model_call: int) -> Iterator[tuple[Key, Piece, Tensor]]:
        """Yield a rank's gradients of outputs of modules whose parameters have right gradients."""
        for key in self.order:
            if key.step != step or key.kind != events.ACTIVATION_GRADIENT or not self.has_right_gradients(key):
                continue
            for of_rank, event in self.of_candidate.get(key, ()):
                place = self._activations.remembered(rank, event)
                if of_rank == rank and event.model_call == model_call and place is not None and not place.summed_over:
                    yield key, Piece(rank, event, place), self.candidate.read(rank, event)

    def has_right_gradients(self, of_output: Key) -> bool:
        """Whether the parameters of the module that has an output have right gradients, and not by a loose bound."""
        owned = [self._gradient(key) for key in self._gradients_of_modules[of_output.step, of_output.name]]
        return all(it.status is Status.AGREES for it in owned) and any(self._is_telling(it) for it in owned)

    @cached_property
    def _gradients_of_modules(self) -> Mapping[tuple[int, str], Sequence[Key]]:
        """The gradients that both sides have, by step and the module that has the parameter."""
        found: dict[tuple[int, str], list[Key]] = defaultdict(list)
        for key in self.of_candidate:
            if key.kind == events.GRADIENT and key in self.of_reference:
                found[key.step, owner_of(key.name)].append(key)
        return found

    def _is_telling(self, outcome: Outcome) -> bool:
        """Whether the bound is so far below the values that agreeing with them says something."""
        piece = next((it for it in outcome.pieces if it.place is not None and it.event.shape), None)
        return piece is not None and piece.event.largest >= 4 * self.bound(outcome.key, piece).largest

    def _factor(self, key: Key, piece: Piece, local: Tensor) -> float | None:
        """Return the factor by which a rank's tensor is the expected one; None if it is no multiple of it."""
        assert piece.place is not None
        whole = self.whole(key)
        if not piece.place.fits(whole, local) or not local.numel():
            return None
        part = piece.place.of(whole)
        factor, rest = scale_of(part, local)
        largest, size = self.bound(key, piece).largest, float(part.double().abs().max())
        fits = size > 0 and rest * abs(factor) * size <= max(largest * abs(factor), 1e-12 * size)
        return factor if fits and factor > 0 else None

    def judged(self, key: Key, pieces: tuple[Piece, ...]) -> Outcome:
        """Compare the ranks' parts of a tensor."""
        return self._stated_sums(key, pieces) or self._homeless(key, pieces) or self._by_values(key, pieces)

    def _homeless(self, key: Key, pieces: tuple[Piece, ...]) -> Outcome | None:
        """Return what to say of tensors that have no place in the reference's; None if all have one."""
        homeless = [it for it in pieces if it.place is None]
        if not homeless:
            return None
        shape, whole = list(homeless[0].event.shape), list(self.whole(key).shape)
        reason = f"{shape} on rank {homeless[0].rank} is no part of {whole}"
        if key.kind != events.PARAMETER:
            return Outcome(key, Status.UNKNOWN, pieces, reason=reason)
        return Outcome(key, Status.DIFFERS, pieces, tuple(homeless), reason=reason)

    def _by_values(self, key: Key, pieces: tuple[Piece, ...]) -> Outcome:
        differing, apart = [], None
        for piece in pieces:
            found = self.difference(key, piece)
            if found is not None:
                differing.append(piece)
                apart = apart or found
        if not differing:
            problem = self._lacks_a_part(key, pieces)
            if problem:
                return Outcome(key, Status.DIFFERS, pieces, pieces, reason=problem)
            return Outcome(key, Status.AGREES, pieces)
        outcome = Outcome(key, Status.DIFFERS, pieces, tuple(differing), apart)
        group = self._ranks_that_add_up(outcome)
        if group is None:
            return outcome
        # Nothing adds these up later; losses come here if the program says that each rank has all of it.
        is_lasting = key.kind in (events.PARAMETER, events.OPTIMIZER_STATE, events.GRADIENT_NORM, events.LOSS)
        return replace(outcome, status=Status.DIFFERS if is_lasting else Status.SUM, summed_over=group)

    def _lacks_a_part(self, key: Key, pieces: Sequence[Piece]) -> str:
        """Say which part of an activation no rank has, though all that ranks have is right; empty if there is none."""
        if key.kind != events.ACTIVATION or len(self.of_reference[key]) > 1:
            return ""
        missing = not_covered([it.place for it in pieces if it.place is not None], self.of_reference[key][0].shape)
        return "" if missing is None else f"no rank has the values at {list(missing)}, and some are on several ranks"

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
            bound = self.bound(key, replace(piece, scale=factor))
            if not bound.holds(found) and not bound.holds(distance(expected * factor, self.read(piece))):
                differing.append(piece)
                apart = apart or found
        status = Status.DIFFERS if differing else Status.AGREES
        return Outcome(key, status, pieces, tuple(differing), apart)

    def _ranks_that_add_up(self, outcome: Outcome) -> tuple[int, ...] | None:
        """Return the ranks whose tensors, added up or averaged, are the expected one; None if there are none."""
        by_call = {(it.rank, it.event.call): it for it in outcome.pieces}
        piece = outcome.differing[0]
        if piece.place is None or (not piece.event.shape and outcome.key.kind == events.ACTIVATION):
            return None
        for group in self.groups:
            parts = [by_call[rank, piece.event.call] for rank in group if (rank, piece.event.call) in by_call]
            # Equal values are scaled, and no parts of a sum; norms of parts may be equal.
            is_sum = outcome.key.kind == events.GRADIENT_NORM or len({it.event.digest for it in parts}) > 1
            if piece.rank in group and len(parts) == len(group) and is_sum and self._add_up(outcome.key, piece, parts):
                return group
        return None

    def _add_up(self, key: Key, piece: Piece, parts: Sequence[Piece]) -> bool:
        """Whether the parts of some ranks are the expected tensor of one of them when they are added up or averaged."""
        values = [self.read(it) for it in parts]
        if len({it.shape for it in values}) > 1:
            return False
        total = torch.stack(values).double().sum(0)
        for place in self._places_for_sum(key, piece):
            expected = place.of(self.whole(key)) * piece.scale
            if expected.shape != total.shape:
                continue
            bound = self.bound(key, replace(piece, place=place))
            bound = Bound(bound.largest * len(parts), bound.mean_square * len(parts))
            if key.kind == events.GRADIENT_NORM:  # each part is rounded
                bound = Bound(*[max(it, last_place(piece.event.dtype) * float(expected)) for it in astuple(bound)])
            bound = bound.of_explanation(distance(expected, self.read(piece)))
            sums = [total, total / len(parts), without_repeated_bias(total, expected)]
            if key.kind == events.GRADIENT_NORM:
                sums = [torch.stack(values).double().square().sum(0).sqrt()]
            for part in sums:
                if bound.holds(distance(expected, part.to(expected.dtype))):
                    return True
        return False

    def _places_for_sum(self, key: Key, piece: Piece) -> list[Place]:
        assert piece.place is not None
        if key.kind not in (events.ACTIVATION, events.INPUT):
            return [piece.place]
        return self._activations.options(piece.rank, piece.event, tuple(self.whole(key).shape)) or [piece.place]


def _are_alike(factor: float, other: float) -> bool:
    return math.isclose(factor, other, rel_tol=CLIPPED_ALIKE)


def _usual(factors: Sequence[float], others: int) -> float | None:
    """Return the factor nearest to 1 of those that several gradients have, or that all have; None if there is none.

    Args:
        factors: of gradients that have one.
        others: how many gradients have none.
    """
    number = {it: sum(_are_alike(it, other) for other in factors) for it in factors}
    often = [it for it, count in number.items() if count >= LEAST_CLIPPED or (count == len(factors) and others)]
    return min(often, key=lambda it: abs(math.log(it)), default=None)
