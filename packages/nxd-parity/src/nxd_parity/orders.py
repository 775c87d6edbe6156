"""Values that are the expected ones of other positions, of other ranks, or of other modules of the same role."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.bounds import Bound, distance
from nxd_parity.comparison import Comparison
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.places import Place, options_by_shape
from nxd_parity.sequence import Key
from nxd_parity.sides import role_of

MOST_ROWS = 4096
MOST_WHOLE_ROWS = 65536
LEAST_MOVED, LEAST_SHARE = 8, 0.25  # elements that are those of another rank, for it to be no chance
MOST_NEARNESS = 1e-4  # of a tensor's size: values that are nearer are equal


def moved(place: Place, scale: float, whole: Tensor, expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain values of other positions of the whole tensor."""
    whole = whole * scale
    for option in options_by_shape(whole.shape, found.shape):
        part = option.of(whole)
        if part.shape == found.shape and bound.holds(distance(part, found)):
            return Diagnosis(of_faults.WRONG_SHARD, f"the values are those of {option}, not of {place}")
    for dim in range(found.dim()):
        where = _moved_along(dim, whole, expected, found, bound)
        if where is not None:
            return Diagnosis(of_faults.WRONG_SHARD, f"along dim {dim} {where}")
    where = _in_other_order(place, whole, found, bound)
    if where is not None:
        return Diagnosis(of_faults.WRONG_SHARD, where)
    if found.dim() == 2 and found.shape[0] == found.shape[1] and bound.holds(distance(expected.T, found)):
        return Diagnosis(of_faults.WRONG_SHARD, "the tensor is transposed")
    if found.numel() > 1 and found.is_floating_point() and not _is_sparse(found):
        # The sorted values of two tensors of one distribution are near each other: rounding alone may part these.
        last_place = torch.finfo(found.dtype).eps * float(expected.abs().max())
        apart = distance(expected.flatten().double().sort().values, found.flatten().double().sort().values)
        if bound.holds(apart) and Bound(2 * last_place, last_place / 4).holds(apart):
            return Diagnosis(of_faults.WRONG_SHARD, "the values are the expected ones in another order")
    return None


def of_other_ranks(comparison: Comparison, outcome: Outcome, piece: Piece, found: Tensor) -> Diagnosis | None:
    """Explain a rank's values, or many of those that differ, by those that another rank should have."""
    assert piece.place is not None
    whole, expected = comparison.whole(outcome.key), comparison.expected(piece, outcome.key)
    nearness = comparison.bound(outcome.key, piece).largest
    wrong = (found - expected).abs() > nearness
    if nearness > MOST_NEARNESS * float(expected.double().square().mean().sqrt()):
        return None  # values that agree within it may do so by chance
    for other in outcome.pieces:
        is_alike = other.rank != piece.rank and other.place is not None and str(other.place) != str(piece.place)
        if not is_alike or other.place is None or other.place.local_shape != piece.place.local_shape:
            continue
        part = other.place.of(whole) * piece.scale
        if part.shape != found.shape:
            continue
        taken = wrong & ((part - found).abs() <= nearness) & (found.abs() > 2 * nearness)
        share = float(taken.double().sum()) / max(float(wrong.double().sum()), 1.0)
        if int(taken.sum()) >= LEAST_MOVED and share >= LEAST_SHARE:
            what = f"rank {piece.rank} has values that rank {other.rank} should have: {share:.0%} of those that differ"
            return Diagnosis(of_faults.WRONG_SHARD, what)
    return None


def moved_at_first(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain values that have the values of other columns at the first position of a dim.

    Attention at the first position of a sequence is that to one token: heads that are in a wrong order show there.
    """
    if found.dim() < 3 or bound.largest > MOST_NEARNESS * float(expected.double().square().mean().sqrt()):
        return None
    for dim in range(found.dim() - 1):
        of_first, wanted = (it.select(dim, 0).double().movedim(-1, 0).flatten(1) for it in (found, expected))
        if not 1 < len(of_first) <= MOST_ROWS or of_first.shape[1] < 2 or bound.holds(distance(wanted, of_first)):
            continue
        positions = torch.cdist(of_first, wanted, p=float("inf")).argmin(1)
        is_distinct = 2 * len(positions.unique()) >= len(positions)
        if is_distinct and bound.holds(distance(wanted[positions], of_first)):
            what = (
                f"at position 0 of dim {dim}, the last dim has the values of positions {_several(positions.tolist())}"
            )
            return Diagnosis(of_faults.WRONG_SHARD, what)
    return None


def rows_of_alike(comparison: Comparison, key: Key, piece: Piece, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain rows by those that modules of the same role should have, such as a layer's other experts."""
    if key.kind not in (events.INPUT, events.ACTIVATION, events.ACTIVATION_GRADIENT) or found.dim() < 2:
        return None
    role = role_of(key.name)
    alike = [
        it
        for it in comparison.of_reference
        if it[:2] == key[:2]
        and it.output == key.output
        and role_of(it.name) == role
        and comparison.of_reference[it][0].shape[1:] == found.shape[1:]
    ]
    rows = found.double().flatten(1)
    rows = rows[rows.abs().amax(1) > bound.largest]
    if len(alike) < 2 or len(rows) < 2 or len(rows) > MOST_ROWS:
        return None
    parts = [comparison.whole(it).double().flatten(1) * piece.scale for it in alike]
    whole = torch.cat(parts)
    positions = _nearest_rows(whole, rows)
    if 4 * len(positions.unique()) < 3 * _distinct(rows, bound) or not bound.holds(distance(whole[positions], rows)):
        return None
    numbers = torch.cat([torch.full((len(it),), number) for number, it in enumerate(parts)])
    names = ", ".join(alike[it].name for it in numbers[positions].unique().tolist())
    if names == key.name:
        return Diagnosis(of_faults.WRONG_SHARD, "its rows are the expected ones in another order")
    return Diagnosis(of_faults.WRONG_SHARD, f"its rows are those of {names}")


def _in_other_order(place: Place, whole: Tensor, found: Tensor, bound: Bound) -> str | None:
    """Describe rows that are in another order along one dim, where parts along other dims tell no place apart."""
    if whole.dim() != found.dim() or found.dim() < 2:
        return None
    for option in _options(place, whole, found):
        part = option.of(whole).double()
        for dim in range(found.dim() - 1):
            rows, of_part = (it.double().movedim(dim, 0).flatten(1) for it in (found, part))
            large = rows.abs().amax(1) > bound.largest
            if not 1 < int(large.sum()) <= len(rows) <= MOST_WHOLE_ROWS:
                continue
            positions = _nearest_rows(of_part, rows)
            is_taken_once = 4 * len(positions[large].unique()) >= 3 * int(large.sum())
            if is_taken_once and bound.holds(distance(of_part[positions], rows)):
                other = "" if str(option) == "all" else f" of {option}"
                return (
                    f"along dim {dim} positions 0..{len(rows) - 1} have the values of positions "
                    f"{_several(positions.tolist())}{other}"
                )
    return None


def _options(place: Place, whole: Tensor, found: Tensor) -> Iterator[Place]:
    yield place
    for option in options_by_shape(whole.shape, found.shape):
        if option.of(whole).shape == found.shape:
            yield option


def _nearest_rows(whole: Tensor, rows: Tensor) -> Tensor:
    """Return the position of a whole tensor's row that is the nearest to each row, by their products with one vector.

    Args:
        whole: [n, values] in float64.
        rows: [m, values] in float64.
    """
    vector = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).cos()
    of_whole, of_rows = whole @ vector, rows @ vector
    order = of_whole.argsort()
    after = torch.searchsorted(of_whole[order].contiguous(), of_rows).clamp(1, max(len(of_whole) - 1, 1))
    after = after.clamp(max=len(of_whole) - 1)
    before = (after - 1).clamp_min(0)
    is_before = (of_whole[order[before]] - of_rows).abs() <= (of_whole[order[after]] - of_rows).abs()
    return order[torch.where(is_before, before, after)]


def _distinct(rows: Tensor, bound: Bound) -> int:
    """Return how many different rows there are; equal ones are equal in all values."""
    return 1 + int((rows.sum(1).sort().values.diff() > bound.largest).sum())


def _is_sparse(tensor: Tensor) -> bool:
    return bool((tensor == 0).double().mean() > 0.5)


def _moved_along(dim: int, whole: Tensor, expected: Tensor, found: Tensor, bound: Bound) -> str | None:
    """Describe the positions along a dim that have values of other positions; None if some have no such values."""
    if whole.dim() != found.dim() or any(
        a != b for it, (a, b) in enumerate(zip(whole.shape, found.shape, strict=True)) if it != dim
    ):
        whole = expected
    rows, of_whole = (it.movedim(dim, 0).reshape(it.shape[dim], -1).double() for it in (found, whole))
    if not rows.numel() or rows.shape[0] > MOST_ROWS or of_whole.shape[0] > MOST_WHOLE_ROWS:
        return None
    positions = torch.cdist(rows, of_whole, p=float("inf")).argmin(1)
    if not bound.holds(distance(of_whole[positions], rows)):
        return None
    is_run = int((positions.diff() == 1).sum()) * 4 >= 3 * (len(positions) - 1)
    large = positions[rows.abs().amax(1) > bound.largest]
    is_taken_once = 4 * len(large.unique()) >= 3 * len(large) > 0
    if not (is_run if rows.shape[1] == 1 else is_taken_once):  # small rows, and single values, have near ones anywhere
        return None
    shown = _several(positions.tolist())
    return f"positions 0..{len(rows) - 1} have the values of positions {shown}"


def _several(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, ..." if len(values) > 8 else shown
