"""Random numbers that differ: masks, noise and initial values that a rank should share with others, or should not."""

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.bounds import Bound
from nxd_parity.comparison import Comparison
from nxd_parity.events import TensorEvent
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.places import Place
from nxd_parity.sequence import Key, owner_of

LEAST_MASKED = 16  # elements that differ by one factor, to be those of a mask
MOST_BEFORE = 64  # tensors that are tried as the masked one
LEAST_EQUAL = 0.5  # of the values that one seed gives for different shapes
NEAR_ONE = (0.5, 2.0)  # factors that noise multiplies by


def other_initial_values(comparison: Comparison, outcome: Outcome) -> Diagnosis | None:
    """Explain initial parameters that are another draw: on one rank, or the same one for different parts."""
    if outcome.key.kind != events.PARAMETER or outcome.key.step > 0:
        return None
    differing = {it.rank for it in outcome.differing}
    ranks = ", ".join(map(str, sorted(differing)))
    which = "rank" if len(differing) == 1 else "ranks"
    places = {str(it.place) for it in outcome.differing}
    values = [comparison.read(it) for it in outcome.differing]
    if len(places) == len(values) > 1 and all(_start_alike(values[0], it) for it in values[1:]):
        what = f"{which} {ranks} have equal values, where each should have its own part: drawn from one seed"
        return Diagnosis(of_faults.RANDOM_NUMBERS, what)
    right = [it.rank for it in outcome.pieces if it.rank not in differing and str(it.place) in places]
    if not right or any(_is_constant(it) for it in values):
        return None
    verb = "has" if len(differing) == 1 else "have"
    what = f"{which} {ranks} {verb} other values than rank {right[0]}, which has the reference's: drawn anew"
    return Diagnosis(of_faults.RANDOM_NUMBERS, what)


def mask_of_a_term(comparison: Comparison, outcome: Outcome, expected: Tensor, found: Tensor, bound: Bound) -> str:
    """Say which module's output is added with another mask; empty if none.

    Values then differ by plus or minus that output times one factor at some elements, and nowhere else.
    """
    key, piece = outcome.key, outcome.differing[0]
    if key.kind not in (events.ACTIVATION, events.INPUT) or not key.name or piece.place is None:
        return ""
    apart = (found.double() - expected.double()).flatten()
    wrong = apart.abs() > bound.largest
    if int(wrong.sum()) < LEAST_MASKED:
        return ""
    before = comparison.order[max(comparison.order.index(key) - MOST_BEFORE, 0) : comparison.order.index(key)]
    for other in reversed(before):
        is_beside = other.step == key.step and other.kind == events.ACTIVATION
        if not is_beside or comparison.of_reference[other][0].shape != comparison.of_reference[key][0].shape:
            continue
        whole = comparison.whole(other)
        if tuple(whole.shape) != piece.place.shape:
            continue
        term = piece.place.of(whole).double().flatten()
        large = wrong & (term.abs() > term.abs().max() / 100)
        factors = apart[large] / term[large]
        if int(large.sum()) < LEAST_MASKED or not bool((factors > 0).any()) or not bool((factors < 0).any()):
            continue
        factor = float(factors.abs().median())
        rest = (apart[wrong].abs() - factor * term[wrong].abs()).abs()
        if factor > 0 and float(rest.max()) <= max(bound.largest, 1e-9 * float(term.abs().max())):
            return f"{other.name} is added with another mask: some of its values times {factor:.4g} more, others less"
    return ""


def input_of_another_rank(comparison: Comparison, outcome: Outcome) -> Diagnosis | None:
    """Explain values by an input of the module, or of one around it, of which the rank has another rank's part."""
    key, piece = outcome.key, outcome.differing[0]
    place = piece.place
    if key.kind not in (events.ACTIVATION, events.INPUT) or place is None or place.flat is not None:
        return None
    wrong = {it.rank for it in outcome.differing}
    for other in comparison.of_reference:
        is_around = other.kind == events.INPUT and other.step == key.step and _is_around(other.name, key)
        if not is_around or other == key or other not in comparison.of_candidate:
            continue
        whole = comparison.whole(other)
        placed = _pieces_as(comparison, other, outcome, whole)
        if placed is None or not whole.is_floating_point():
            continue
        for it in placed:
            if it.rank not in wrong or comparison.difference(other, it) is None:
                continue
            owner = next((of for of in placed if _has_values_of(comparison, whole, it, of)), None)
            if owner is not None:
                what = f"rank {it.rank} got what rank {owner.rank} should get as input {other.output}"
                what += f" of {other.name or 'the model'}"
                return Diagnosis(of_faults.RANDOM_NUMBERS if _are_factors(whole) else of_faults.DIFFERENT_DATA, what)
    return None


def _is_around(name: str, key: Key) -> bool:
    inside = key.name if key.kind == events.ACTIVATION else owner_of(key.name)
    return not name or name in (inside, key.name) or inside.startswith(f"{name}.")


def _pieces_as(comparison: Comparison, key: Key, outcome: Outcome, whole: Tensor) -> list[Piece] | None:
    """Return the ranks' parts of an input where their parts of the tensor that differs are; None if they fit not."""
    events_of: dict[tuple[int, int], TensorEvent] = {
        (rank, event.call): event for rank, event in comparison.of_candidate[key]
    }
    found = []
    for piece in outcome.pieces:
        event, place = events_of.get((piece.rank, piece.event.call)), piece.place
        if event is None or place is None or place.flat is not None or not whole.dim():
            return None
        index = []
        for dim, size in enumerate(whole.shape):
            at = place.index[dim] if dim < len(place.index) and place.shape[dim] == size else None
            index.append(at if event.shape[dim : dim + 1] != (size,) else None)
        own = Place(tuple(whole.shape), tuple(index))
        if own.local_shape != event.shape or own.is_whole:
            return None
        found.append(Piece(piece.rank, event, own))
    return found


def _has_values_of(comparison: Comparison, whole: Tensor, piece: Piece, other: Piece) -> bool:
    is_other = other.rank != piece.rank and str(other.place) != str(piece.place)
    if not is_other or other.place is None:
        return False
    part, found = other.place.of(whole), comparison.read(piece)
    return part.shape == found.shape and torch.equal(part, found)


def _are_factors(tensor: Tensor) -> bool:
    """Whether values are those of a mask (zeros and one other value), or near one: what noise multiplies by."""
    low, high = float(tensor.min()), float(tensor.max())
    is_mask = low == 0 < high and bool(((tensor == 0) | (tensor == high)).all())
    return is_mask or (low < high and NEAR_ONE[0] <= low and high <= NEAR_ONE[1])


def _start_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have mostly equal values, as those that one seed gives; a shard may be shorter."""
    count = min(tensor.numel(), other.numel())
    start = tensor.flatten()[:count]
    return not _is_constant(start) and bool((start == other.flatten()[:count]).double().mean() > LEAST_EQUAL)


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all()) if tensor.numel() else True
