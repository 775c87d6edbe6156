"""Sums with other terms than the expected ones: a term that is missing, or counted again, or one of an earlier step."""

import math
from collections.abc import Iterator

from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.activations import scale_of
from nxd_parity.bounds import Bound, distance
from nxd_parity.comparison import Comparison
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.sequence import Key

MOST_BEFORE = 32  # tensors that are tried as a term
LEAST_APART = 16.0  # bounds by which a term differs, for it to be no chance
NEAR = 1e-3  # of a factor


def other_terms(
    comparison: Comparison, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
) -> Diagnosis | None:
    """Explain a tensor by the output of a module, or the gradient of one, that is not in it or is in it again."""
    key, place = outcome.key, piece.place
    of_gradients = key.kind == events.ACTIVATION_GRADIENT
    if place is None or found.numel() < 2 or (key.kind not in (events.ACTIVATION, events.INPUT) and not of_gradients):
        return None
    apart = found.double() - expected.double()
    if distance(expected, found).largest < LEAST_APART * bound.largest:
        return None
    for other in _before(comparison, key):
        whole = comparison.whole(other)
        if whole.shape[-1:] != place.shape[-1:] or whole.numel() != math.prod(place.shape):
            continue
        term = place.of(whole.reshape(place.shape)).double() * piece.scale
        factor, _ = scale_of(term, apart)
        if abs(factor) > NEAR and bound.holds(distance(factor * term, apart)):
            what = f"the {'gradient of the ' if of_gradients else ''}output of {other.name}"
            return _of_term(what, factor)
    return None


def _before(comparison: Comparison, key: Key) -> Iterator[Key]:
    """Yield the tensors of a step that were computed last before another, of the kind that it may be a sum of."""
    at, kind = comparison.order.index(key), events.ACTIVATION
    if key.kind == events.ACTIVATION_GRADIENT:
        kind = key.kind
    count = 0
    for other in reversed(comparison.order[:at]):
        if other.step != key.step or count == MOST_BEFORE:
            return
        if other.kind == kind:
            count += 1
            yield other


def _of_term(what: str, factor: float) -> Diagnosis:
    if abs(factor + 1) < NEAR:
        return Diagnosis(of_faults.MISSING_TERM, f"{what} is not in it")
    times = 1 + factor
    if abs(factor - round(factor)) < NEAR and factor > 0:
        return Diagnosis(of_faults.SUMMED_TWICE, f"{what} is in it {round(times)} times")
    return Diagnosis(of_faults.SCALED, f"{what} is in it {times:.4g} times")


def earlier_gradient(
    comparison: Comparison, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
) -> Diagnosis | None:
    """Explain a gradient by the one of the step before, which was not set to zero; clipping may have scaled it."""
    earlier = outcome.key._replace(step=outcome.key.step - 1)
    is_gradient = outcome.key.kind == events.GRADIENT and earlier in comparison.of_reference
    if not is_gradient or piece.place is None or found.numel() < 2:
        return None
    whole = comparison.whole(earlier)
    if tuple(whole.shape) != piece.place.shape or distance(expected, found).largest < LEAST_APART * bound.largest:
        return None
    old, apart = piece.place.of(whole).double(), found.double() - expected.double()
    factor, _ = scale_of(old, apart)
    if factor <= NEAR or not bound.holds(distance(factor * old, apart)):
        return None
    what = f"{factor:.4g} times the gradient of step {earlier.step} is in it, which was not set to zero"
    return Diagnosis(of_faults.STALE, what)
