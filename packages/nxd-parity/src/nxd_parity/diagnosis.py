"""What is wrong with a tensor: which simple change of the expected values gives those that were found."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.activations import scale_of
from nxd_parity.attention import has_own_positions, of_later_tokens, other_positions
from nxd_parity.bounds import Bound, distance
from nxd_parity.chance import input_of_another_rank, mask_of_a_term, other_initial_values
from nxd_parity.comparison import Comparison
from nxd_parity.explanations import extent, has_other_rows, lost_targets, masked, other_targets, rounded, scaled_by_row
from nxd_parity.orders import moved, moved_at_first, of_other_ranks, rows_of_alike
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.places import Place, options_by_shape, whole_place
from nxd_parity.relations import is_same_state, other_state, rows_of_others, times_of_bias, untied_copy
from nxd_parity.sequence import Key, owner_of
from nxd_parity.terms import earlier_gradient, other_terms
from nxd_parity.updates import other_norm, other_update

MOST_ROUNDING = 0.05  # of a factor, in the least precise dtype
MOST_REST = 0.25  # what a factor may leave of a tensor, in shares of its largest value


class Diagnostician:
    """Tries the explanations one after the other, the specific ones first."""

    def __init__(self, comparison: Comparison) -> None:
        """Take the comparison, which reads the tensors."""
        self._comparison = comparison

    def diagnose(self, outcome: Outcome) -> Diagnosis:
        """Return the first explanation that fits a tensor that differs."""
        piece = outcome.differing[0]
        if outcome.key.kind == events.INPUT and not piece.event.dtype.is_floating_point:
            what = outcome.reason or "the ranks got other inputs than the reference"
            return Diagnosis(of_faults.DIFFERENT_DATA, what)
        if outcome.summed_over:
            ranks = ", ".join(map(str, outcome.summed_over))
            what = f"ranks {ranks} have parts of a sum that were not added up"
            return Diagnosis(of_faults.MISSING_SUM, what, axis=f"groups of {len(outcome.summed_over)} ranks")
        if piece.place is None or outcome.reason:
            is_of_positions = has_own_positions(self._comparison, outcome.key)
            return Diagnosis(of_faults.WRONG_POSITIONS if is_of_positions else of_faults.WRONG_SHARD, outcome.reason)
        return self._by_values(outcome, piece)

    def _by_values(self, outcome: Outcome, piece: Piece) -> Diagnosis:
        expected, found = self._comparison.expected(piece, outcome.key), self._comparison.read(piece)
        if outcome.key.kind == events.LOSS and outcome.apart is not None:  # a sum over calls, and a mean over ranks
            expected, found = torch.tensor(outcome.apart.expected), torch.tensor(outcome.apart.found)
        if expected.shape != found.shape:
            what = f"its shape is {list(found.shape)} instead of {list(expected.shape)}"
            return Diagnosis(of_faults.WRONG_SHARD, what)
        bound = self._comparison.bound(outcome.key, piece)
        if outcome.key.kind == events.LOSS:
            bound = self._comparison.rounding_of_loss(outcome.key, float(expected))
        bound = bound.of_explanation(distance(expected, found))
        for diagnosis in self._explanations(outcome, piece, expected, found, bound):
            if diagnosis is not None:
                return diagnosis
        if outcome.key.kind in (events.ACTIVATION_GRADIENT, events.GRADIENT) and self._copies_differ(outcome):
            return Diagnosis(of_faults.MISSING_SUM, "ranks that should have equal values have each their own part")
        if outcome.key.kind == events.INPUT and not outcome.key.name:
            return Diagnosis(of_faults.DIFFERENT_DATA, "the ranks got other inputs than the reference")
        return Diagnosis(of_faults.DIFFERENT_VALUES, extent(expected, found, bound))

    def _explanations(
        self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
    ) -> Iterator[Diagnosis | None]:
        assert piece.place is not None
        if outcome.key.kind == events.GRADIENT_NORM:
            yield other_norm(self._comparison, outcome, expected, found)
        yield other_update(self._comparison, outcome, piece, expected, found, bound)
        yield self._scaled(outcome, expected, found, bound)
        if outcome.key.kind == events.LOSS:
            return
        yield self._stale(outcome, piece, expected, found, bound)
        yield self._masked(outcome, expected, found, bound)
        yield moved(piece.place, piece.scale, self._comparison.whole(outcome.key), expected, found, bound)
        yield self._of_another(outcome, piece, found, bound)
        yield self._of_sibling(outcome.key, piece.place, found, bound)
        yield self._related(outcome, piece, expected, found, bound)
        yield earlier_gradient(self._comparison, outcome, piece, expected, found, bound)
        yield of_other_ranks(self._comparison, outcome, piece, found)
        yield rows_of_alike(self._comparison, outcome.key, piece, found, bound)
        yield moved_at_first(expected, found, bound)
        yield from other_positions(self._comparison, outcome, piece, expected, found, bound)
        yield other_terms(self._comparison, outcome, piece, expected, found, bound)
        yield other_state(self._comparison, outcome, piece, expected, found, bound)
        yield other_initial_values(self._comparison, outcome)
        yield input_of_another_rank(self._comparison, outcome)
        what = mask_of_a_term(self._comparison, outcome, expected, found, bound)
        yield Diagnosis(of_faults.RANDOM_NUMBERS, what) if what else None
        if outcome.key.kind == events.ACTIVATION_GRADIENT:
            yield other_targets(expected, found, bound)
            yield lost_targets(expected, found, bound)
            yield scaled_by_row(expected, found, bound)
        yield rounded(expected, found)
        if outcome.key.kind == events.INPUT:
            yield of_later_tokens(expected, found, bound)

    def _masked(self, outcome: Outcome, expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
        diagnosis = masked(expected, found, bound)
        if diagnosis is not None and not bool(found.any()):
            ranks = sorted({it.rank for it in outcome.differing if not bool(self._comparison.read(it).any())})
            return replace(diagnosis, detail=f"all values of rank {', '.join(map(str, ranks))} are zero")
        if diagnosis is not None and diagnosis.fault == of_faults.DROPPED_TOKENS:
            of_ranks = [
                (self._comparison.expected(it, outcome.key), self._comparison.read(it)) for it in outcome.differing
            ]
            if any(has_other_rows(*it) for it in of_ranks):
                return Diagnosis(
                    of_faults.WRONG_SHARD, f"{diagnosis.detail}, and others should be: another mask of rows"
                )
        return diagnosis

    def _copies_differ(self, outcome: Outcome) -> bool:
        """Whether the ranks that have the same part of a tensor disagree about its values."""
        for number, piece in enumerate(outcome.pieces):
            for other in outcome.pieces[:number]:
                is_copy = other.event.call == piece.event.call and str(other.place) == str(piece.place)
                if is_copy and piece.place is not None and other.rank != piece.rank:
                    apart = distance(self._comparison.read(other), self._comparison.read(piece))
                    if not self._comparison.bound(outcome.key, piece).holds(apart):
                        return True
        return False

    def _scaled(self, outcome: Outcome, expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
        if expected.numel() < 2 and outcome.key.kind not in (events.GRADIENT_NORM, events.LOSS):
            return None
        factor, rest = scale_of(expected, found)
        if rest * abs(factor) > 1e-3 and outcome.key.kind == events.ACTIVATION and expected.dim() > 1:
            factor, rest = scale_of(_without_mean_row(expected), _without_mean_row(found))  # a bias is not scaled
            expected = _without_mean_row(expected)
        size = float(expected.double().abs().max())
        if rest > MOST_REST or rest * abs(factor) * size > 2 * bound.largest * max(abs(factor), 1.0):
            return None
        tolerance = max(bound.largest / size if size else 0.0, 1e-9)
        of_group = self._by_size_of_group(factor, tolerance)
        if of_group is not None or abs(factor - 1) <= tolerance:
            return of_group
        if outcome.key.kind == events.LOSS and not _is_simple(factor, tolerance):
            return None  # any two numbers have a factor
        is_averaging = self._all_scaled_alike(outcome, factor, tolerance)
        fault = of_faults.WRONG_AVERAGING if is_averaging else of_faults.SCALED
        return Diagnosis(fault, f"the values are {factor:.6g} times the expected ones", factor)

    def _by_size_of_group(self, factor: float, tolerance: float) -> Diagnosis | None:
        nearness = min(4 * tolerance, MOST_ROUNDING)
        for size in sorted({len(it) for it in self._comparison.groups}, reverse=True):
            axis = f"groups of {size} ranks"
            if abs(factor - size) <= nearness * size:
                what = f"the values are {size} times the expected ones, the number of ranks in a group"
                return Diagnosis(of_faults.SUMMED_TWICE, what, float(size), axis)
            if abs(factor * size - 1) <= nearness:
                what = f"the values are 1/{size} of the expected ones; groups have {size} ranks"
                return Diagnosis(of_faults.SCALED, what, 1 / size, axis)
        return None

    def _all_scaled_alike(self, outcome: Outcome, factor: float, tolerance: float) -> bool:
        """Whether the whole step's gradients have one factor that is no size of a group: of the loss."""
        if outcome.key.kind not in (events.ACTIVATION_GRADIENT, events.GRADIENT):
            return False
        return not _is_simple(factor, tolerance)

    def _stale(self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
        key = outcome.key
        for step in (key.step - 1, key.step - 2):
            earlier = key._replace(step=step)
            if earlier in self._comparison.of_reference:
                whole = self._comparison.whole(earlier)
                if whole.shape != piece.place.shape:  # type: ignore[union-attr]
                    continue
                old = piece.place.of(whole).to(found.dtype) * piece.scale  # type: ignore[union-attr]
                if bound.holds(distance(old, found)):
                    return Diagnosis(of_faults.STALE, f"the values are those of step {step}")
                is_new = (found - expected).abs() <= bound.largest
                if bool(is_new.any()) and bound.holds(distance(old[~is_new], found[~is_new])):
                    return Diagnosis(of_faults.STALE, f"some of the values are those of step {step}")
        return None

    def _of_sibling(self, key: Key, place: Place, found: Tensor, bound: Bound) -> Diagnosis | None:
        """Values of the input of another module inside the same one: a joint output was cut in a wrong way."""
        if key.kind != events.INPUT:
            return None
        for other, calls in self._comparison.of_reference.items():
            is_sibling = other[:2] == key[:2] and other.name != key.name and owner_of(other.name) == owner_of(key.name)
            if not is_sibling or calls[0].shape != place.shape:
                continue
            whole = self._comparison.whole(other)
            for option in [whole_place(whole.shape), *options_by_shape(whole.shape, found.shape)]:
                part = option.of(whole)
                if part.shape == found.shape and bound.holds(distance(part, found)):
                    what = f"{key.name} got what {other.name} should get ({option})"
                    return Diagnosis(of_faults.WRONG_SHARD, what, place=self._split_before(key))
        return None

    def _split_before(self, key: Key) -> str:
        """Return the last module before another of the same parent of whose parameters ranks have parts."""
        before = self._comparison.order[: self._comparison.order.index(key)]
        siblings = [it.name for it in before if it.step == key.step and owner_of(it.name) == owner_of(key.name)]
        return next((it for it in reversed(siblings) if self._comparison.parameters.is_split(it)), "")

    def _of_another(self, outcome: Outcome, piece: Piece, found: Tensor, bound: Bound) -> Diagnosis | None:
        """Values of another parameter of the same shape."""
        if outcome.key.kind not in (events.PARAMETER, events.GRADIENT, events.OPTIMIZER_STATE):
            return None
        for other in self._comparison.of_reference:
            if other[:2] != outcome.key[:2] or other == outcome.key or not is_same_state(other, outcome.key):
                continue
            event = self._comparison.of_reference[other][0]
            if event.shape != piece.place.shape:  # type: ignore[union-attr]
                continue
            part = piece.place.of(self._comparison.whole(other))  # type: ignore[union-attr]
            if bound.holds(distance(part, found)):
                is_parameter = outcome.key.kind == events.PARAMETER
                fault = of_faults.WRONG_SHARD if is_parameter else of_faults.OTHER_STATE
                return Diagnosis(fault, f"the values are those of {other.name}")
        return None

    def _related(
        self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
    ) -> Diagnosis | None:
        what = rows_of_others(self._comparison, outcome.key, found)
        if what:
            return Diagnosis(of_faults.WRONG_SHARD, what)
        times = times_of_bias(self._comparison, outcome.key, piece, expected, found, bound)
        if times != 1:
            what = f"the bias is added {times} times" if times else "the bias is not added"
            return Diagnosis(of_faults.SUMMED_TWICE if times else of_faults.MISSING_TERM, what)
        what = untied_copy(self._comparison, outcome.key, piece, expected, found, bound)
        return Diagnosis(of_faults.MISSING_SUM, what) if what else None


def _without_mean_row(tensor: Tensor) -> Tensor:
    rows = tensor.double().flatten(0, -2)
    return rows - rows.mean(0)


def _is_simple(factor: float, tolerance: float) -> bool:
    """Whether a factor is a whole number or one divided by one, but not 1."""
    if factor <= 0:
        return False
    nearest_simple = max(round(factor), 1) if factor >= 1 else 1 / max(round(1 / factor), 1)
    return nearest_simple != 1 and abs(factor - nearest_simple) <= min(10 * tolerance, MOST_ROUNDING) * nearest_simple
