"""What a wrong tensor has to do with others: rows of other parameters, a bias added again, copies that are not tied."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity.bounds import Bound, distance
from nxd_parity.comparison import Comparison
from nxd_parity.events import TensorEvent
from nxd_parity.outcome import Piece
from nxd_parity.places import bytes_of_rows
from nxd_parity.sequence import Key

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


def repeated_bias(comparison: Comparison, key: Key, expected: Tensor, found: Tensor, bound: Bound) -> str:
    """Say how many times a module's bias is in its output, where each rank added it; empty if once."""
    of_bias = Key(key.step - 1, events.PARAMETER, f"{key.name}.bias", 0)
    if key.kind != events.ACTIVATION or of_bias not in comparison.of_reference or found.dim() < 2:
        return ""
    bias = comparison.whole(of_bias).double()
    if bias.shape != found.shape[-1:] or not bool(bias.any()):
        return ""
    more = (found.double() - expected.double()).flatten(0, -2).mean(0)
    times = round(float(more @ bias) / float(bias @ bias))
    if times == 0 or not bound.holds(distance(expected.double() + times * bias, found)):
        return ""
    return f"the bias is added {times + 1} times"


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
