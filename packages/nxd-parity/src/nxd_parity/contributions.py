"""Which ranks' rows a gradient is made of, and how often each counts: a regression on what each rank's rows give.

The gradient of a linear layer's weight is the sum over rows of products of the output's gradient and the input. Each
call on each rank has some of the reference's rows.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.activations import scale_of
from nxd_parity.bounds import distance
from nxd_parity.comparison import Comparison
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.report import plural
from nxd_parity.sequence import Key, owner_of

MOST_SHARES, MOST_NUMBERS = 32, 50_000_000
NEAR, LOST = 0.01, 1e-3  # shares of the largest weight
Call = tuple[int, int]  # a rank, and its call of the model


@dataclass(frozen=True)
class _Share:
    """What some rows give to a gradient.

    Attributes:
        calls: the ranks and calls that have these rows; several where ranks split other dims.
        weight: how often they count, relative to what they should.
    """

    calls: tuple[Call, ...]
    weight: float


def other_rows(comparison: Comparison, outcome: Outcome) -> Diagnosis | None:
    """Explain a gradient by rows that are not in it, are in it again, or count more than others."""
    piece = outcome.differing[0]
    if outcome.key.kind != events.GRADIENT or piece.place is None:
        return None
    shares = _shares(comparison, outcome.key, piece)
    largest = max((it.weight for it in shares), default=0.0)
    least = min((it.weight for it in shares), default=0.0)
    if least < -NEAR * largest or least >= (1 - NEAR) * largest:
        return None
    lost = [it for it in shares if it.weight <= LOST * largest]
    return _of_lost(piece.rank, lost, [it for it in shares if it not in lost]) if lost else _by_weight(shares)


def _of_lost(rank: int, lost: Sequence[_Share], kept: Sequence[_Share]) -> Diagnosis:
    """Explain a rank's gradient, of which some rows are no part."""
    if all(_ranks(it) & {rank} for it in kept) and not _ranks(*lost) & {rank}:
        return Diagnosis(of_faults.MISSING_SUM, f"on rank {rank} only its own rows are in it")
    if not _ranks(*lost) & _ranks(*kept):
        what = f"the rows of ranks {', '.join(map(str, sorted(_ranks(*lost))))} are not in it"
        return Diagnosis(of_faults.MISSING_SUM, what)
    return Diagnosis(of_faults.DROPPED_TOKENS, f"the rows of {_named(lost)} are not in it")


def _by_weight(shares: Sequence[_Share]) -> Diagnosis:
    first, last = min(shares, key=lambda it: it.weight), max(shares, key=lambda it: it.weight)
    often = [it for it in shares if it.weight > (1 + NEAR) * first.weight]
    times = last.weight / first.weight
    if abs(first.weight - 1) <= NEAR and all(abs(it.weight - round(times)) <= NEAR * times for it in often):
        return Diagnosis(of_faults.SUMMED_TWICE, f"the rows of {_named(often)} count {round(times)} times")
    what = (
        f"rows of {_named([first])} count {first.weight:.4g} times, those of {_named([last])} {last.weight:.4g} times"
    )
    return Diagnosis(of_faults.WRONG_AVERAGING, what)


def _ranks(*shares: _Share) -> set[int]:
    return {rank for it in shares for rank, _ in it.calls}


def _named(shares: Sequence[_Share]) -> str:
    """Name calls of the model, such as "call 2 of the model on ranks 0, 1"."""
    of_calls: dict[int, list[int]] = defaultdict(list)
    for rank, call in sorted({call for it in shares for call in it.calls}):
        of_calls[call].append(rank)
    of_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for call, ranks in sorted(of_calls.items()):
        of_ranks[tuple(ranks)].append(call + 1)
    return " and ".join(
        f"{plural('call', len(calls))} {', '.join(map(str, calls))} of the model on {plural('rank', len(ranks))} "
        f"{', '.join(map(str, ranks))}"
        for ranks, calls in of_ranks.items()
    )


def _shares(comparison: Comparison, key: Key, piece: Piece) -> list[_Share]:
    """Return how often the rows of each call count in a gradient; none if it is no sum of them."""
    assert piece.place is not None
    given = _rows(comparison, key)
    calls = {} if given is None else _calls(comparison, key, len(given[0]))
    found = comparison.read(piece).double()
    if given is None or not 2 <= len(calls) <= MOST_SHARES or found.numel() * len(calls) > MOST_NUMBERS:
        return []
    whole = comparison.whole(key)
    bound, total = comparison.bound(key, piece), _product(*given, whole.shape)
    if total.shape != whole.shape:
        return []
    factor, _ = scale_of(total, whole)  # of a program's own clipping
    if factor <= 0 or not bound.holds(distance(whole.double(), factor * total)):
        return []
    bound = bound.of_explanation(distance(comparison.expected(piece, key), found))
    parts = []
    for rows in calls:
        at = torch.tensor(rows)
        parts.append(factor * piece.place.of(_product(given[0][at], given[1][at], whole.shape)).flatten())
    columns = torch.stack(parts, 1)
    if int(torch.linalg.matrix_rank(columns.T @ columns)) < len(calls):
        return []
    weights = torch.linalg.lstsq(columns, found.flatten()[:, None]).solution[:, 0]
    if not bound.holds(distance((columns @ weights).view(found.shape), found)):
        return []
    return [_Share(tuple(it), float(weight)) for it, weight in zip(calls.values(), weights, strict=True)]


def _rows(comparison: Comparison, key: Key) -> tuple[Tensor, Tensor] | None:
    """Return the reference's gradient of a module's output, and its input, as rows; None if they are not known.

    The input of an embedding is [rows]; for a bias, the input is one.
    """
    module, leaf = owner_of(key.name), key.name.rpartition(".")[2]
    of_output = Key(key.step, events.ACTIVATION_GRADIENT, module, 0)
    if of_output not in comparison.of_reference or not comparison.whole(of_output).dim():
        return None
    gradient = comparison.whole(of_output).double()
    gradient = gradient.reshape(-1, gradient.shape[-1])
    if leaf == "bias":
        return gradient, torch.ones(len(gradient), 1, dtype=torch.float64)
    given = comparison.input_of(key.step, module)
    if given is None:
        return None
    whole = comparison.whole(given)
    rows = whole.double().reshape(-1, whole.shape[-1]) if whole.is_floating_point() else whole.flatten()
    return (gradient, rows) if len(rows) == len(gradient) else None


def _calls(comparison: Comparison, key: Key, rows: int) -> Mapping[tuple[int, ...], list[Call]]:
    """Return the calls of each set of rows of a module's output."""
    output = Key(key.step, events.ACTIVATION, owner_of(key.name), 0)
    found: dict[tuple[int, ...], list[Call]] = defaultdict(list)
    for rank, event in comparison.of_candidate.get(output, ()):
        place = comparison.place_of_activation(rank, event)
        if place is None or place.flat is not None:
            return {}
        dims = [torch.arange(size) if it is None else it for size, it in zip(place.shape, place.index, strict=True)]
        flat = torch.zeros(1, dtype=torch.long)
        for size, positions in zip(place.shape[:-1], dims[:-1], strict=True):
            flat = (flat[:, None] * size + positions).flatten()
        if flat.numel() and int(flat.max()) >= rows:
            return {}
        found[tuple(flat.sort().values.tolist())].append((rank, event.model_call))
    return found


def _product(gradient: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of a parameter that some rows give, in its shape if it is one of a linear layer."""
    if not rows.is_floating_point():
        return torch.zeros(shape[0], gradient.shape[1], dtype=torch.float64).index_add(0, rows, gradient)
    product = gradient.T @ rows
    return product.reshape(tuple(shape)) if product.numel() == torch.Size(shape).numel() else product
