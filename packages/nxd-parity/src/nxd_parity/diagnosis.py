"""What is wrong with a tensor: which simple change of the expected values gives those that were found."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.activations import scale_of
from nxd_parity.bounds import Bound, distance
from nxd_parity.comparison import Comparison
from nxd_parity.outcome import Outcome, Piece
from nxd_parity.places import options_by_shape
from nxd_parity.relations import repeated_bias, rows_of_others, untied_copy
from nxd_parity.sequence import Key

MOST_ROUNDING = 0.05  # of a factor, in the least precise dtype
OTHER_COUNTS = "ranks count different numbers of rows"
LOWER = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Diagnosis:
    """A fault and what is known about it; see `Finding`."""

    fault: str
    detail: str = ""
    factor: float = 1.0
    axis: str = ""


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
            return Diagnosis(of_faults.WRONG_SHARD, outcome.reason)
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
            bound = self._comparison.rounding_of_loss(float(expected))
        bound = bound.of_explanation(distance(expected, found))
        of_values = (self._scaled, self._stale, self._moved, self._masked)
        for explain in (*of_values, self._of_another, self._related, self._rounded):
            diagnosis = explain(outcome, piece, expected, found, bound)
            if diagnosis is not None:
                return diagnosis
        if outcome.key.kind in (events.ACTIVATION_GRADIENT, events.GRADIENT) and self._copies_differ(outcome):
            return Diagnosis(of_faults.MISSING_SUM, "ranks that should have equal values have each their own part")
        return Diagnosis(of_faults.DIFFERENT_VALUES)

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

    def _scaled(
        self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
    ) -> Diagnosis | None:
        if expected.numel() < 2 and outcome.key.kind not in (events.GRADIENT_NORM, events.LOSS):
            return None
        factor, rest = scale_of(expected, found)
        if rest * abs(factor) > 1e-3 and outcome.key.kind == events.ACTIVATION and expected.dim() > 1:
            factor, rest = scale_of(_without_mean_row(expected), _without_mean_row(found))  # a bias is not scaled
            expected = _without_mean_row(expected)
        size = float(expected.double().abs().max())
        if abs(factor) < 1e-6 or rest * abs(factor) * size > 2 * bound.largest * max(abs(factor), 1.0):
            return None
        tolerance = max(bound.largest / size if size else 0.0, 1e-9)
        of_group = self._by_size_of_group(factor, tolerance)
        if of_group is not None or abs(factor - 1) <= tolerance:
            return of_group
        if outcome.key.kind == events.LOSS and not _is_simple(factor, tolerance):
            differ = self._comparison.have_other_counts(outcome.key.step)
            return Diagnosis(of_faults.WRONG_AVERAGING, OTHER_COUNTS) if differ else None
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

    def _moved(self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
        whole = self._comparison.whole(outcome.key)
        for option in options_by_shape(whole.shape, found.shape):
            part = option.of(whole) * piece.scale
            if part.shape == found.shape and bound.holds(distance(part, found)):
                return Diagnosis(of_faults.WRONG_SHARD, f"the values are those of {option}, not of {piece.place}")
        for dim in range(found.dim()):
            moved = _moved_along(dim, whole * piece.scale, expected, found, bound)
            if moved is not None:
                return Diagnosis(of_faults.WRONG_SHARD, f"along dim {dim} {moved}")
        if found.dim() == 2 and found.shape[0] == found.shape[1] and bound.holds(distance(expected.T, found)):
            return Diagnosis(of_faults.WRONG_SHARD, "the tensor is transposed")
        if found.numel() > 1 and not _is_sparse(found):
            wanted, got = expected.flatten().double().sort().values, found.flatten().double().sort().values
            if bound.holds(distance(wanted, got)):
                return Diagnosis(of_faults.WRONG_SHARD, "the values are the expected ones in another order")
        return None

    def _masked(
        self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
    ) -> Diagnosis | None:
        """Zeros in other places: whole rows are dropped tokens, single elements are another dropout mask."""
        if not found.dim():
            return None
        rows_found, rows_expected = found.reshape(-1, found.shape[-1]), expected.reshape(-1, expected.shape[-1])
        lost = (rows_found == 0).all(1) & (rows_expected != 0).any(1)
        has_lost = bool(lost.any()) and bool((~lost).any())
        if has_lost and bound.holds(distance(rows_expected[~lost], rows_found[~lost])):
            return Diagnosis(of_faults.DROPPED_TOKENS, f"{int(lost.sum())} of {len(lost)} rows are zero")
        zero_found, zero_expected = found == 0, expected == 0
        both = ~zero_found & ~zero_expected
        if bool((zero_found != zero_expected).any()) and bool(both.any()):
            share = float(zero_found.double().mean()), float(zero_expected.double().mean())
            if min(share) > 0.01 and bound.holds(distance(expected[both], found[both])):
                return Diagnosis(of_faults.RANDOM_NUMBERS, "other elements are zero: another mask")
        return None

    def _of_another(
        self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
    ) -> Diagnosis | None:
        """Values of another parameter of the same shape."""
        if outcome.key.kind not in (events.PARAMETER, events.GRADIENT, events.OPTIMIZER_STATE):
            return None
        for other in self._comparison.of_reference:
            if other[:2] != outcome.key[:2] or other == outcome.key or not _is_same_state(other, outcome.key):
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
        what = repeated_bias(self._comparison, outcome.key, expected, found, bound)
        if what:
            return Diagnosis(of_faults.SUMMED_TWICE, what)
        what = untied_copy(self._comparison, outcome.key, piece, expected, found, bound)
        return Diagnosis(of_faults.MISSING_SUM, what) if what else None

    def _rounded(
        self, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
    ) -> Diagnosis | None:
        if not found.dtype.is_floating_point:
            return None
        apart, size = distance(expected, found), float(expected.double().square().mean().sqrt())
        relative = apart.mean_square / size if size else float("inf")
        for dtype in LOWER:
            last_place = torch.finfo(dtype).eps
            is_lower = last_place > torch.finfo(found.dtype).eps and relative <= last_place
            if is_lower and (dtype == torch.float32 or (found.dim() and _is_rounded_to(dtype, expected, found))):
                return Diagnosis(
                    of_faults.LOWER_PRECISION,
                    f"the values differ by {relative:.1e} of their size, as after rounding to {str(dtype)[6:]}",
                )
        return None


def _is_rounded_to(dtype: torch.dtype, expected: Tensor, found: Tensor) -> bool:
    """Whether nearly all values are ones that a smaller dtype has, or differ by a share of themselves."""
    has_values = (found.to(dtype).to(found.dtype) == found).double().mean() > 0.9
    is_share = (expected - found).abs() <= 2 * torch.finfo(dtype).eps * expected.abs()
    return bool(has_values) or bool(is_share.double().mean() > 0.9)


def _without_mean_row(tensor: Tensor) -> Tensor:
    rows = tensor.double().flatten(0, -2)
    return rows - rows.mean(0)


def _is_simple(factor: float, tolerance: float) -> bool:
    """Whether a factor is a whole number or one divided by one."""
    if factor <= 0:
        return False
    nearest_simple = max(round(factor), 1) if factor >= 1 else 1 / max(round(1 / factor), 1)
    return abs(factor - nearest_simple) <= min(10 * tolerance, MOST_ROUNDING) * nearest_simple


def _is_same_state(other: Key, key: Key) -> bool:
    return key.kind != events.OPTIMIZER_STATE or other.name.rpartition("/")[2] == key.name.rpartition("/")[2]


def _is_sparse(tensor: Tensor) -> bool:
    return bool((tensor == 0).double().mean() > 0.5)


def _moved_along(dim: int, whole: Tensor, expected: Tensor, found: Tensor, bound: Bound) -> str | None:
    """Describe the positions along a dim that have values of other positions; None if some have no such values."""
    if whole.dim() != found.dim() or any(
        a != b for it, (a, b) in enumerate(zip(whole.shape, found.shape, strict=True)) if it != dim
    ):
        whole = expected
    rows, of_whole = (it.movedim(dim, 0).reshape(it.shape[dim], -1).double() for it in (found, whole))
    if not rows.numel() or rows.shape[0] > 4096 or of_whole.shape[0] > 65536:
        return None
    positions = torch.cdist(rows, of_whole, p=float("inf")).argmin(1)
    if not bound.holds(distance(of_whole[positions], rows)):
        return None
    shown = _several(positions.tolist())
    return f"positions 0..{len(rows) - 1} have the values of positions {shown}"


def _several(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, ..." if len(values) > 8 else shown
