"""What a wrong tensor has to do with others: rows of other parameters, a bias added again, copies that are not tied."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.bounds import Bound, distance
from nxd_parity.comparison import Comparison
from nxd_parity.events import TensorEvent
from nxd_parity.outcome import Diagnosis, Outcome, Piece
from nxd_parity.places import bytes_of_rows
from nxd_parity.sequence import Key, owner_of

MOST_ROWS = 65536


def rows_of_others(comparison: Comparison, key: Key, found: Tensor) -> str:
    """Say of which parameters a parameter has the rows, as one that is cut out of a fused matrix; empty if of none."""
    if key.kind != events.PARAMETER or found.dim() < 2 or found.shape[0] > MOST_ROWS:
        return ""
    known: dict[bytes, str] = {}
    for other in comparison.of_reference:
        event = comparison.of_reference[other][-1]
        fits = event.shape[1:] == found.shape[1:] and len(event.shape) == found.dim() and event.dtype == found.dtype
        if other[:2] == key[:2] and fits and len(known) <= MOST_ROWS:
            for row in bytes_of_rows(comparison.whole(other), 0):
                known.setdefault(row, other.name)
    names = [known.get(row, "") for row in bytes_of_rows(found, 0)]
    if not all(names) or set(names) == {key.name}:
        return ""
    return f"its rows are those of {', '.join(dict.fromkeys(names))}"


def times_of_bias(comparison: Comparison, key: Key, piece: Piece, expected: Tensor, found: Tensor, bound: Bound) -> int:
    """Return how many times a module's bias is in its output, by values; 1 if that explains no difference."""
    if key.kind != events.ACTIVATION or found.dim() < 2 or piece.place is None:
        return 1
    more = (found.double() - expected.double()).flatten(0, -2).mean(0)
    for name in _vectors_of(comparison, key):
        bias = comparison.whole(name).double()
        if piece.place.flat is None and piece.place.index[-1] is not None and bias.shape == piece.place.shape[-1:]:
            bias = bias[piece.place.index[-1]]
        if bias.shape == found.shape[-1:] and bool(bias.any()):
            times = round(float(more @ bias) / float(bias @ bias))
            if times != 0 and bound.holds(distance(expected.double() + times * bias, found)):
                return max(1 + times, 0)
    return 1


def _vectors_of(comparison: Comparison, key: Key) -> list[Key]:
    """Return the parameters of one dim that a module had before a step: one of them may be its bias."""
    return [
        it
        for it in comparison.of_reference
        if (it.step, it.kind, owner_of(it.name)) == (key.step - 1, events.PARAMETER, key.name)
        and len(comparison.of_reference[it][-1].shape) == 1
    ]


def other_state(
    comparison: Comparison, outcome: Outcome, piece: Piece, expected: Tensor, found: Tensor, bound: Bound
) -> Diagnosis | None:
    """Explain an optimizer's state by its count of steps, or by that of another parameter, which has this one's.

    The states of two parameters that were exchanged when they were loaded then differ by the same values, one less and
    one more.
    """
    key = outcome.key
    if key.kind != events.OPTIMIZER_STATE:
        return None
    if key.name.rpartition("/")[2] == "step" and found.numel() == 1:
        what = f"it counts {float(found):.0f} steps instead of {float(expected):.0f}"
        return Diagnosis(of_faults.STALE, what)
    apart = expected.double() - found.double()
    for other, of_ranks in comparison.of_candidate.items():
        is_alike = other[:2] == key[:2] and other != key and is_same_state(other, key)
        if not is_alike or other not in comparison.of_reference or piece.place is None:
            continue
        whole = comparison.whole(other).double()
        for rank, event in of_ranks:
            if tuple(whole.shape) == piece.place.shape and event.shape == tuple(found.shape):
                more = comparison.candidate.read(rank, event).double() - piece.place.of(whole)
                if bound.holds(distance(apart, more)):
                    what = f"it was exchanged with that of {other.name.rpartition('/')[0]}, it seems"
                    return Diagnosis(of_faults.OTHER_STATE, what, place=key.name.rpartition("/")[0])
    return None


def is_same_state(other: Key, key: Key) -> bool:
    """Whether two tensors are the same state of an optimizer, of two parameters, or no states."""
    return key.kind != events.OPTIMIZER_STATE or other.name.rpartition("/")[2] == key.name.rpartition("/")[2]


def untied_copy(comparison: Comparison, key: Key, piece: Piece, expected: Tensor, found: Tensor, bound: Bound) -> str:
    """Say which parameter of the candidate alone has the rest of a gradient: the two are one in the reference."""
    if key.kind != events.GRADIENT:
        return ""
    for other, of_ranks in comparison.of_candidate.items():
        if other[:2] != key[:2] or other in comparison.of_reference:
            continue
        rest = _whole_of(comparison, other, of_ranks, piece.place.shape) if piece.place is not None else None
        if rest is not None and piece.place is not None:
            total = found.double() + piece.place.of(rest)
            if bound.holds(distance(expected, total.to(expected.dtype))):
                return f"the rest of it is the gradient of {other.name}, which is the same parameter in the reference"
    return ""


def _whole_of(
    comparison: Comparison, key: Key, of_ranks: Sequence[tuple[int, TensorEvent]], shape: tuple[int, ...]
) -> Tensor | None:
    """Return the candidate's tensor in float64, put together of the ranks' parts; None if one has no place."""
    whole = torch.zeros(shape, dtype=torch.float64)
    for rank, event in of_ranks:
        place = comparison.parameters.place(key.name, rank, event, shape)
        if place is None or place.shape != shape or place.flat is not None or place.local_shape != event.shape:
            return None
        positions = [torch.arange(size) if it is None else it for size, it in zip(shape, place.index, strict=True)]
        whole[torch.meshgrid(*positions, indexing="ij")] = comparison.candidate.read(rank, event).double()
    return whole
