"""What a step did to a parameter or to the norm of gradients: another learning rate, other decay, other gradients."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.activations import scale_of
from nxd_parity.bounds import Bound, distance
from nxd_parity.comparison import Comparison
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.sequence import modules_around

LEAST_ELEMENTS = 8  # of a parameter that two factors explain
PRECISE = 1e-5  # of a norm's square, so that no two gradients' shares are taken for each other


def other_update(
    comparison: Comparison, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
) -> Diagnosis | None:
    """Explain a parameter after a step by another learning rate or another decay of the one before it."""
    before = outcome.key._replace(step=outcome.key.step - 1)
    if outcome.key.kind != events.PARAMETER or before not in comparison.of_reference or found.numel() < 2:
        return None
    whole = comparison.whole(before)
    if piece.place is None or tuple(whole.shape) != piece.place.shape:
        return None
    old = piece.place.of(whole).double()
    wanted, got = expected.double() - old, found.double() - old
    factor, _ = scale_of(wanted, got)
    if factor > 0 and abs(factor - 1) > 1e-6 and bound.holds(distance(factor * wanted, got)):
        what = f"the update is {factor:.6g} times the expected one, as with another learning rate"
        return Diagnosis(of_faults.SCALED, what, factor)
    share, _ = scale_of(old, got - wanted)
    if 0 < abs(share) < 1 and bound.holds(distance(wanted + share * old, got)):
        what = f"{abs(share):.4g} of the parameter is {'lost' if share < 0 else 'added'}, as with other weight decay"
        return Diagnosis(of_faults.SCALED, what, 1 + share)
    return _other_rate_and_decay(old, wanted, got, bound)


def _other_rate_and_decay(old: Tensor, wanted: Tensor, got: Tensor, bound: Bound) -> Diagnosis | None:
    columns = torch.stack([wanted.flatten(), old.flatten()], 1)
    if len(columns) <= LEAST_ELEMENTS or int(torch.linalg.matrix_rank(columns)) < columns.shape[1]:
        return None
    factor, share = torch.linalg.lstsq(columns, got.flatten()[:, None]).solution.flatten().tolist()
    if not factor > 0 or abs(share) >= 1 or not bound.holds(distance(factor * wanted + share * old, got)):
        return None
    what = (
        f"the update is {factor:.6g} times the expected one, and {abs(share):.4g} of the parameter is "
        f"{'lost' if share < 0 else 'added'}: another learning rate and another weight decay"
    )
    return Diagnosis(of_faults.SCALED, what, factor)


def other_norm(comparison: Comparison, outcome: Outcome, expected: Tensor, found: Tensor) -> Diagnosis | None:
    """Explain a norm of gradients by the gradients that are in it: a rank's own, or some of several ranks."""
    if outcome.key.kind != events.GRADIENT_NORM or found.dim():
        return None
    wanted, got = float(expected) ** 2, float(found) ** 2
    squares = _squares(comparison, outcome.key.step)
    rank = outcome.differing[0].rank
    own = sum(squares[rank].values())
    if _is_near(own, got, got) and len(squares) > 1:
        what = f"it is the norm of the gradients that rank {rank} has itself"
        return Diagnosis(of_faults.MISSING_SUM, what, math.sqrt(got / wanted) if wanted else 1.0)
    if got <= wanted:
        return None
    if _is_near(sum(sum(it.values()) for it in squares.values()), got, got - wanted):
        return Diagnosis(of_faults.SUMMED_TWICE, "gradients that several ranks have count once for each rank")
    for key in comparison.order:
        if key.step == outcome.key.step and key.kind == events.GRADIENT:
            share = float(comparison.whole(key).double().square().sum())
            for times in range(1, comparison.candidate.world_size):
                if share and _is_near(wanted + times * share, got, got - wanted):
                    return Diagnosis(of_faults.SUMMED_TWICE, f"{key.name} counts {times + 1} times in it")
    return None


def other_clipping(comparison: Comparison, step: int, factor: float) -> str:
    """Say which norm of gradients explains that a program's own clipping left all of them with a factor.

    Gradients that were clipped have the same norm as each other, so the factor is that of the two norms before it.
    Empty if no simple norm does.
    """
    squares = {
        key.name: float(comparison.whole(key).double().square().sum())
        for key in comparison.order
        if key.step == step and key.kind == events.GRADIENT
    }
    total, wanted = sum(squares.values()), 1 / factor**2
    if not total or not math.isfinite(wanted):
        return ""
    tolerance = 1e-3 * abs(wanted - 1)
    if abs(sum(map(math.sqrt, squares.values())) ** 2 / total - wanted) <= tolerance:
        return "clipped by the sum of the norms of all parameters"
    groups = {*squares, *(module for name in squares for module in modules_around(name))}
    for group in sorted(groups, key=len):
        share = sum(it for name, it in squares.items() if name == group or name.startswith(f"{group}.")) / total
        times = 1 + (wanted - 1) / share if share else 1.0
        if abs(share - 1) > tolerance and abs(share * (round(times) - times)) <= tolerance:
            if round(times) == 0:
                return f"clipped by a norm without {group}"
            if 1 < round(times) <= comparison.candidate.world_size:
                return f"clipped by a norm in which {group} counts {round(times)} times"
    return ""


def _squares(comparison: Comparison, step: int) -> dict[int, dict[str, float]]:
    """Return the sums of squares of each rank's gradients in a step, by name."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for key, of_ranks in comparison.of_candidate.items():
        if key.step == step and key.kind == events.GRADIENT:
            for rank, event in of_ranks:
                found[rank][key.name] = float(comparison.candidate.read(rank, event).double().square().sum())
    return found


def _is_near(value: float, other: float, size: float) -> bool:
    return abs(value - other) <= PRECISE * abs(size)
