"""What values say of positions: angles, rows of position embeddings, masks, and the token that is attended to."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.bounds import Bound, distance
from nxd_parity.comparison import Comparison
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.sequence import Key, owner_of

MOST_NEARNESS = 1e-6  # of a tensor's size: values that are nearer are equal
LEAST_ELEMENTS, LEAST_POSITIONS = 4, 3
MOST_BEFORE = 12  # tensors in which values are looked for
MOST_VALUES = 1 << 22


def other_positions(
    comparison: Comparison, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
) -> Iterator[Diagnosis | None]:
    """Yield explanations of an activation by positions in a sequence."""
    is_forward = outcome.key.kind in (events.ACTIVATION, events.INPUT) and found.is_floating_point()
    size = float(expected.double().square().mean().sqrt())
    if not is_forward or found.dim() < 2 or not size or bound.largest > MOST_NEARNESS * size:
        return  # values that agree within a looser bound may do so by chance
    yield _rotated(expected.double(), found.double(), bound)
    yield _other_embeddings(comparison, outcome.key, piece, expected.double(), found.double(), bound)
    yield _without_mask(expected, found, bound)
    yield _attends_elsewhere(comparison, outcome.key, expected.double(), found.double(), bound)


def has_own_positions(comparison: Comparison, key: Key) -> bool:
    """Whether a module looks up rows of its parameter by other numbers than the model's inputs: by positions."""
    given = [other for other in comparison.of_reference if other[:3] == (key.step, events.INPUT, "")]
    wanted = comparison.whole(key).double()
    for other in comparison.of_reference:
        is_own = other.kind == events.PARAMETER and other.step == key.step - 1 and owner_of(other.name) == key.name
        if (
            key.kind != events.ACTIVATION
            or not is_own
            or comparison.of_reference[other][-1].shape[1:] != wanted.shape[-1:]
        ):
            continue
        rows, found = comparison.whole(other).double(), wanted.flatten(0, -2)
        if len(found) * len(rows) > MOST_VALUES or float(torch.cdist(found, rows, p=math.inf).amin(1).max()) > 0:
            continue
        return not any(torch.equal(_looked_up(rows, comparison.whole(it)), wanted) for it in given)
    return False


def _looked_up(rows: Tensor, numbers: Tensor) -> Tensor:
    if (
        numbers.is_floating_point()
        or not numbers.numel()
        or not 0 <= int(numbers.min()) <= int(numbers.max()) < len(rows)
    ):
        return rows.new_zeros(0)
    return rows[numbers.long()]


def _rotated(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Rotary embeddings turn pairs of values by angles, which leaves the size of each pair."""
    last = found.shape[-1]
    sizes = [last // heads for heads in range(1, last // 2 + 1) if last % heads == 0 and last // heads % 2 == 0]
    largest = 4 * bound.largest * float(expected.abs().max())
    for size in sizes:
        for dim in (-2, -1):  # halves of a head, or neighbors
            shape = (2, size // 2) if dim == -2 else (size // 2, 2)
            pairs = [it.unflatten(-1, (last // size, *shape)).square().sum(dim) for it in (expected, found)]
            if float((pairs[0] - pairs[1]).abs().max()) <= largest:
                what = "pairs of values have the right size and another angle: rotary positions, or their frequencies"
                return Diagnosis(of_faults.WRONG_POSITIONS, what)
    return None


def _other_embeddings(
    comparison: Comparison, key: Key, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
) -> Diagnosis | None:
    """A module adds the rows of its own parameter: those of other positions."""
    if key.kind != events.ACTIVATION or piece.place is None or piece.place.flat is not None:
        return None
    for other in comparison.of_reference:
        is_own = other.kind == events.PARAMETER and other.step == key.step - 1 and owner_of(other.name) == key.name
        if not is_own or comparison.of_reference[other][-1].shape[1:] != found.shape[-1:]:
            continue
        rows = comparison.whole(other).double()
        for dim in range(found.dim() - 1):
            at = piece.place.index[dim]
            positions = torch.arange(found.shape[dim]) if at is None else at
            apart = (found - expected).movedim(dim, 0).reshape(found.shape[dim], -1, found.shape[-1])
            if not len(apart) or int(positions.max()) >= len(rows):
                continue
            wanted = apart[:, 0] + rows[positions]
            nearest = torch.cdist(wanted, rows, p=float("inf")).argmin(1)
            same = (rows[nearest] - rows[positions])[:, None].expand_as(apart)
            if bound.holds(distance(same, apart)):
                what = f"it adds rows {_several(nearest)} of {other.name}, not {_several(positions)}"
                return Diagnosis(of_faults.WRONG_POSITIONS, what)
    return None


def _without_mask(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """With a causal mask only the last position sees all others: without it, that one alone agrees."""
    for dim in range(found.dim() - 1):
        size = found.shape[dim]
        if size < LEAST_POSITIONS:
            continue
        agrees = [bound.holds(distance(expected.select(dim, it), found.select(dim, it))) for it in range(size)]
        if agrees[-1] and not any(agrees[:-1]):
            what = f"of dim {dim} only the last position agrees, which sees all others: later ones are not masked"
            return Diagnosis(of_faults.WRONG_MASK, what)
    return None


def of_later_tokens(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain what a module makes of right outputs of others: tokens up to one agree and all later ones differ."""
    for dim in range(1, found.dim() - 1):
        agrees = [
            bound.holds(distance(expected.select(dim, it), found.select(dim, it))) for it in range(found.shape[dim])
        ]
        first = agrees.index(False) if False in agrees else 0
        if first >= 2 and not any(agrees[first:]):
            what = f"of dim {dim} positions 0..{first - 1} agree, and none after them: these see other tokens, it seems"
            return Diagnosis(of_faults.WRONG_MASK, what)
    return None


def _attends_elsewhere(
    comparison: Comparison, key: Key, expected: Tensor, found: Tensor, bound: Bound
) -> Diagnosis | None:
    """The first position of a sequence attends to itself alone: its output are the values of one token, as they are."""
    for dim in range(found.dim() - 1):
        first, wanted = found.select(dim, 0), expected.select(dim, 0)
        if first.numel() < LEAST_ELEMENTS or bound.holds(distance(wanted, first)):
            continue
        for other in _before(comparison, key):
            whole = comparison.whole(other).double()
            at = _positions_in(whole, first, bound)
            if at is None:
                continue
            of_wanted = _positions_in(whole, wanted, bound)
            where = f"at position 0 of dim {dim} it has values of {other.name}"
            if of_wanted is None:
                what = f"{where} alone, as where a sequence begins: the mask is that of other positions"
                return Diagnosis(of_faults.WRONG_MASK, what)
            what = f"{where} at {at} and so on, not those at {of_wanted}"
            return Diagnosis(of_faults.WRONG_SHARD, what)
    return None


def _before(comparison: Comparison, key: Key) -> Sequence[Key]:
    before = comparison.order[: comparison.order.index(key)]
    return [
        it
        for it in reversed(before[-MOST_BEFORE:])
        if it.step == key.step and it.kind in (events.ACTIVATION, events.INPUT) and it[1:3] != key[1:3]
    ]


def _positions_in(whole: Tensor, values: Tensor, bound: Bound) -> list[int] | None:
    """Return where a tensor has the first of some values; None if it lacks one of them."""
    if not 1 < whole.numel() <= MOST_VALUES:
        return None
    known, order = whole.flatten().sort()
    wanted = values.flatten()
    after = torch.searchsorted(known, wanted).clamp(1, len(known) - 1)
    before = after - 1
    at = torch.where((known[before] - wanted).abs() <= (known[after] - wanted).abs(), before, after)
    if float((known[at] - wanted).abs().max()) > bound.largest or len(at.unique()) < LEAST_ELEMENTS:
        return None
    return [int(it) for it in torch.unravel_index(order[at[0]], whole.shape)]


def _several(positions: Tensor) -> str:
    shown = ", ".join(map(str, positions[:4].tolist()))
    return f"{shown}, ..." if len(positions) > 4 else shown
