"""Where in its tensor a difference lies, in which ranks' shards; and what became of every tensor."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity import report as of
from nxd_parity.comparison import Comparison
from nxd_parity.outcome import Outcome, Piece, Status
from nxd_parity.places import Place
from nxd_parity.report import Location, Report

MOST_CELLS = 64  # along rows and columns of the picture
LEVELS = 9


def add_tensors(report: Report, comparison: Comparison, outcomes: Sequence[Outcome]) -> None:
    """Write into a report what became of each tensor, and where in its tensor the first difference lies.

    Args:
        report: the report, with its findings.
        comparison: reads the tensors.
        outcomes: those of all tensors, in the order of execution.
    """
    first = report.first
    for outcome in outcomes:
        key = outcome.key
        of_kind = report.tensors.setdefault(key.step, {}).setdefault(key.kind, {})
        is_first = first is not None and (key.step, key.kind, key.name) == (first.step, first.kind, first.shown_in)
        if is_first:
            if report.location is None and (outcome.status is not Status.AGREES or key.kind == events.PARAMETER):
                report.location = _location(comparison, outcome)
            status = of.DIFFERS_FIRST
        elif outcome.status is Status.DIFFERS:
            status = of.WITHOUT_EFFECT if first is None or key.step < first.step else of.DIFFERS_LATER
        else:
            status = of.NOT_COMPARED if outcome.status is Status.UNKNOWN else of.AGREES
        of_kind[key.name] = min(status, of_kind.get(key.name, of.AGREES), key=of.STATUSES.index)


def _location(comparison: Comparison, outcome: Outcome) -> Location | None:
    """Return where a tensor differs; None if the ranks' shards of it are not known, or it is a single number."""
    shape = tuple(comparison.whole(outcome.key).shape)
    pieces = [it for it in outcome.pieces if it.place is not None and it.place.shape == shape]
    if not shape or not math.prod(shape) or not pieces:
        return None
    index: tuple[int, ...] = ()
    rank, part, flat = -1, None, None
    if outcome.differing and outcome.apart is not None and outcome.apart.index:
        rank, part = outcome.differing[0].rank, outcome.differing[0].place
        assert part is not None
        index, flat = part.first_position(outcome.apart.index), part.flat
    threshold = comparison.bound(outcome.key, pieces[0]).largest
    if outcome.apart is not None and outcome.apart.largest <= threshold:
        threshold = 0.0  # the differences are wrong together, not each by itself
    dims = _dims(shape, pieces)
    plane = _Plane(shape, dims, index or (0,) * len(shape))
    differing = total = 0
    for piece in pieces:
        apart = _differences(comparison, outcome, piece)
        if apart is not None:
            differing, total = differing + int((apart > threshold).sum()), total + apart.numel()
        plane.add(piece, apart)
    holders, owners = plane.owners()
    return Location(
        shape=shape,
        index=index,
        rank=rank,
        part=() if part is None else _part(index, part),
        flat=() if flat is None else (flat[0], flat[1] - 1),
        share=differing / total if total else 0.0,
        dims=dims,
        cell=plane.cell,
        differences=plane.levels(threshold),
        holders=holders,
        owners=owners,
    )


def _differences(comparison: Comparison, outcome: Outcome, piece: Piece) -> Tensor | None:
    """Return the absolute differences of a rank's tensor, in its shape; None if it has another shape."""
    assert piece.place is not None
    found = comparison.read(piece).double()
    if piece.place.summed_over:  # what the ranks have is right once it is added up
        group = [
            it for it in outcome.pieces if it.rank in piece.place.summed_over and it.event.call == piece.event.call
        ]
        found = torch.stack([comparison.read(it).double() for it in group]).sum(0)
    expected = comparison.expected(piece, outcome.key).double()
    if expected.shape != found.shape:
        return None
    is_same = (expected == found) | (expected.isnan() & found.isnan())
    apart = (expected - found).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return apart.masked_fill(is_same, 0.0)


def _dims(shape: Sequence[int], pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Choose the dims to be shown: those that ranks split, then the last ones that have several positions."""
    split = {dim for it in pieces if it.place is not None for dim, at in enumerate(it.place.index) if at is not None}
    order = sorted(range(len(shape)), key=lambda dim: (dim not in split, shape[dim] == 1, -dim))
    return tuple(sorted(order[:2]))


def _part(index: Sequence[int], place: Place) -> tuple[tuple[int, int], ...]:
    """Return for each dim the first and last position of the run of positions around an element that a rank has."""
    parts = []
    for size, at, positions in zip(place.shape, index, place.index, strict=False):
        first, last = 0, size - 1
        if positions is not None:
            owned = set(positions.tolist())
            first = last = at
            while first - 1 in owned:
                first -= 1
            while last + 1 in owned:
                last += 1
        parts.append((first, last))
    return tuple(parts)


class _Plane:
    """The plane of a tensor through one of its elements: differences, and the ranks that have the elements."""

    def __init__(self, shape: tuple[int, ...], dims: tuple[int, ...], index: tuple[int, ...]) -> None:
        self._shape, self._dims, self._index = shape, dims, index
        rows, columns = (1, shape[dims[0]]) if len(dims) == 1 else (shape[dims[0]], shape[dims[1]])
        self.cell = (math.ceil(rows / MOST_CELLS), math.ceil(columns / MOST_CELLS))
        self._values = torch.zeros(rows, columns, dtype=torch.float64)
        starts = [torch.arange(0, size, step) for size, step in zip((rows, columns), self.cell, strict=True)]
        self._starts = torch.meshgrid(*starts, indexing="ij")
        self._holders: list[list[set[int]]] = [[set() for _ in starts[1]] for _ in starts[0]]

    def add(self, piece: Piece, apart: Tensor | None) -> None:
        """Add a rank's elements; `apart` has its differences, if they are known."""
        place = piece.place
        assert place is not None
        if place.flat is not None:
            has = torch.zeros(math.prod(self._shape), dtype=torch.bool)
            has[place.flat[0] : place.flat[1]] = True
            values = torch.zeros(has.shape, dtype=torch.float64)
            if apart is not None:
                values[has] = apart
            has, values = self._cut(has.view(self._shape)), self._cut(values.view(self._shape))
        else:
            found = list(self._local_positions(piece))
            if any(not len(it) for dim, it in enumerate(found) if dim not in self._dims):
                return
            rows, columns = self._axes([torch.arange(size) if it is None else it for size, it in self._at(piece)])
            has = torch.zeros(self._values.shape, dtype=torch.bool)
            has[rows[:, None], columns] = True
            values = torch.zeros_like(self._values)
            if apart is not None:
                for dim, at in enumerate(found):
                    apart = apart if dim in self._dims else apart.index_select(dim, at[:1])
                values[rows[:, None], columns] = apart.reshape(len(rows), len(columns))
        self._values = torch.maximum(self._values, values)
        for row, of_row in enumerate(has[self._starts].tolist()):
            for column, is_held in enumerate(of_row):
                if is_held:
                    self._holders[row][column].add(piece.rank)

    def _at(self, piece: Piece) -> Iterator[tuple[int, Tensor | None]]:
        assert piece.place is not None
        yield from zip(self._shape, piece.place.index, strict=True)

    def _local_positions(self, piece: Piece) -> Iterator[Tensor]:
        """Yield for each dim where in the rank's tensor the plane's position along it is."""
        for at, (_, positions) in zip(self._index, self._at(piece), strict=True):
            yield torch.tensor([at]) if positions is None else (positions == at).nonzero().flatten()

    def _axes(self, positions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        shown = [positions[dim] for dim in self._dims]
        return (shown[0], shown[1]) if len(shown) == 2 else (torch.zeros(1, dtype=torch.long), shown[0])

    def _cut(self, whole: Tensor) -> Tensor:
        kept = tuple(slice(None) if dim in self._dims else at for dim, at in enumerate(self._index))
        return whole[kept].reshape(self._values.shape)

    def levels(self, threshold: float) -> tuple[tuple[int, ...], ...]:
        """Return the largest difference of each cell on a scale of 0 to 9."""
        (rows, columns), (high, wide) = self._starts[0].shape, self.cell
        padded = torch.zeros(rows * high, columns * wide, dtype=torch.float64)
        padded[: self._values.shape[0], : self._values.shape[1]] = self._values
        cells = padded.view(rows, high, columns, wide).amax(dim=(1, 3))
        largest = float(cells.max())
        return tuple(tuple(_level(it, largest) if it > threshold else 0 for it in row) for row in cells.tolist())

    def owners(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return the sets of ranks, and for each cell the set that has it; see `Location`."""
        holders = sorted({tuple(sorted(it)) for row in self._holders for it in row if it})
        number = {it: at for at, it in enumerate(holders)} | {(): -1}
        owners = tuple(tuple(number[tuple(sorted(it))] for it in row) for row in self._holders)
        return tuple(holders), owners


def _level(value: float, largest: float) -> int:
    if value >= largest:
        return LEVELS
    return 1 if math.isinf(largest) else max(LEVELS + math.floor(2 * math.log10(value / largest)), 1)
