"""Which part of a whole tensor a rank's tensor is, where the program does not say it.

Parameters are found by their initial values, which are equal in both programs; activations by the part of the inputs
that a rank has, or, where that does not settle it, by the nearest values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from nxd_parity.events import Placement

Index = Tensor | None  # positions along a dim of the whole tensor; None: all of them
MOST_OPTIONS = 256
SAMPLE = 4096  # elements by which the nearest place is chosen


@dataclass(frozen=True)
class Place:
    """The part of a whole tensor that a rank has.

    Attributes:
        shape: shape of the whole tensor.
        index: for each dim the positions, in the order in which the rank has them.
        summed_over: the ranks whose tensors add up to this part; empty if nothing is to be added up.
        padding: for each dim, how many positions at the end of the rank's tensor are none of the whole tensor's.
        flat: the range of the flattened tensor instead, if the rank has one of those.
        is_padded: whether the rank's rows are whole ones, though the whole tensor has more padding.
    """

    shape: tuple[int, ...]
    index: tuple[Index, ...]
    summed_over: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    flat: tuple[int, int] | None = None
    is_padded: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor of the whole shape: a view where positions are consecutive."""
        if self.flat is not None:
            return whole.flatten()[self.flat[0] : self.flat[1]]
        for dim, positions in enumerate(self.index):
            if positions is not None:
                start = _start_of_run(positions)
                if start is not None and start + len(positions) <= whole.shape[dim]:
                    whole = whole.narrow(dim, start, len(positions))
                else:
                    whole = whole.index_select(dim, positions)
        return whole

    def fits(self, whole: Tensor, local: Tensor) -> bool:
        """Whether the place is one in a tensor, and has the shape of a rank's."""
        return self.shape == tuple(whole.shape) and self.of(whole).shape == local.shape

    @property
    def is_whole(self) -> bool:
        """Whether the rank has the whole tensor."""
        return self.flat is None and all(it is None for it in self.index)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor."""
        if self.flat is not None:
            return (self.flat[1] - self.flat[0],)
        padding = self.padding or (0,) * len(self.shape)
        sizes = (size if it is None else len(it) for size, it in zip(self.shape, self.index, strict=True))
        return tuple(size + more for size, more in zip(sizes, padding, strict=True))

    def without_padding(self, local: Tensor) -> Tensor:
        """Return a rank's tensor without the positions that the whole tensor does not have."""
        for dim, count in enumerate(self.padding):
            local = local.narrow(dim, 0, local.shape[dim] - count)
        return local

    def first_position(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return where in the whole tensor an element of the rank's tensor is."""
        if self.flat is not None:
            return tuple(int(it) for it in torch.unravel_index(torch.tensor(self.flat[0] + index[0]), self.shape))
        return tuple(
            at if positions is None else int(positions[at]) for at, positions in zip(index, self.index, strict=True)
        )

    def __str__(self) -> str:
        if self.flat is not None:
            return f"elements {self.flat[0]}..{self.flat[1] - 1} of the flattened tensor"
        parts = [f"dim {dim} {_ranges(it)}" for dim, it in enumerate(self.index) if it is not None]
        return ", ".join(parts) or "all"


def part_of_flat(whole: tuple[int, ...], local: Sequence[int], rank: int, ranks: int) -> Place | None:
    """Return the place of a rank's equal part of a flat tensor, padded at its end; None if it has no such part."""
    if len(whole) != 1 or len(local) != 1 or not local[0] or -(-whole[0] // local[0]) != ranks:
        return None
    stop = min((rank + 1) * local[0], whole[0])
    return Place(whole, (torch.arange(rank * local[0], stop),), padding=((rank + 1) * local[0] - stop,))


def not_covered(places: Sequence[Place], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first position of a whole tensor that is in no place; None if there is none, or a place is flat."""
    if not places or any(it.flat is not None for it in places) or any(it.is_whole for it in places):
        return None
    indices = [(it.index[0], *[None] * (len(shape) - 1)) if it.is_padded else it.index for it in places]
    split = [any(it[dim] is not None for it in indices) for dim in range(len(shape))]
    covered = torch.zeros([size if is_split else 1 for size, is_split in zip(shape, split, strict=True)]) > 0
    for index in indices:
        positions = [torch.arange(size) if it is None else it for size, it in zip(covered.shape, index, strict=True)]
        covered[torch.meshgrid(*positions, indexing="ij")] = True
    missing = (~covered).nonzero()
    return tuple(missing[0].tolist()) if len(missing) else None


def _start_of_run(positions: Tensor) -> int | None:
    """Return the first of positions that follow one another; None if they do not."""
    if not len(positions) or int(positions[-1]) - int(positions[0]) != len(positions) - 1:
        return None
    start = int(positions[0])
    return start if torch.equal(positions, torch.arange(start, start + len(positions))) else None


def whole_place(shape: Sequence[int]) -> Place:
    """Return the place of a tensor that a rank has whole."""
    return Place(tuple(shape), (None,) * len(shape))


def stated_place(placement: Placement, shape: Sequence[int]) -> Place:
    """Return the place that a program states; `shape` is that of the rank's tensor."""
    index: list[Index] = []
    for dim, (start, size, whole) in enumerate(zip(placement.start, shape, placement.shape, strict=True)):
        runs = placement.runs[dim] if placement.runs else ((start, size),)
        positions = [torch.arange(first, first + count) for first, count in runs]
        index.append(None if size == whole and len(runs) == 1 else torch.cat([torch.arange(0), *positions]))
    return Place(placement.shape, tuple(index), placement.summed_over)


def options_by_shape(
    whole: Sequence[int], local: Sequence[int], known: Sequence[Sequence[Tensor]] | None = None
) -> list[Place]:
    """Return the parts of a tensor that have a shape: for each dim a contiguous chunk, or two chunks of a zigzag.

    Args:
        whole: shape of the whole tensor.
        local: shape of the rank's tensor.
        known: for each dim, the positions that the rank has there in other tensors; they come first.
    """
    if len(whole) != len(local):
        return []
    dims: list[list[Index]] = []
    for dim, (size, own) in enumerate(zip(whole, local, strict=True)):
        if own == size:
            dims.append([None])
        else:
            dims.append([*(known[dim] if known is not None else ()), *_chunks(size, own)])
    count = 1
    for options in dims:
        count *= len(options)
    if not 0 < count <= MOST_OPTIONS:
        return []
    return [Place(tuple(whole), index) for index in product(*dims)]


def nearest(options: Sequence[Place], whole: Tensor, local: Tensor) -> Place | None:
    """Return the place whose values are nearest to a rank's; the first of those that are equally near."""
    if len(options) <= 1:
        return options[0] if options else None
    stride = max(local.numel() // SAMPLE, 1)
    sample = local.flatten()[::stride].double().nan_to_num()
    apart = [(it.of(whole).flatten()[::stride].double().nan_to_num() - sample).square().sum() for it in options]
    return options[int(torch.stack(apart).argmin())]


def _chunks(size: int, own: int) -> Iterator[Tensor]:
    if own == 0 or size % own:
        return
    parts = size // own
    for part in range(parts):
        yield torch.arange(part * own, (part + 1) * own)
    if own % 2 == 0:  # the order of causal context parallelism: an early and a late chunk
        half = own // 2
        for part in range(parts):
            late = 2 * parts - 1 - part
            yield torch.cat([torch.arange(it * half, (it + 1) * half) for it in (part, late)])
    if parts > 1:  # every n-th, as samplers of data do
        for part in range(parts):
            yield torch.arange(part, size, parts)


def place_of_parameter(whole: Tensor, local: Tensor) -> list[Place]:
    """Return the places where a rank's initial values are, exactly: none, one, or several if values repeat.

    Considered are the whole tensor, contiguous parts along one or two dims, rows in any order along one dim, with zeros
    behind them, and a range of the flattened tensor.
    """
    if whole.shape == local.shape and torch.equal(whole, local):
        return [whole_place(whole.shape)]
    if whole.dim() == local.dim() and all(own <= size for own, size in zip(local.shape, whole.shape, strict=True)):
        found = [place for place in contiguous_places(whole.shape, local.shape) if torch.equal(place.of(whole), local)]
        if found:
            return found
    if whole.dim() == local.dim():
        rows = _rows_in_any_order(whole, local)
        if rows is not None:
            return [rows]
    if local.dim() == 1 and local.numel() < whole.numel():
        return _flat(whole, local)
    return []


def contiguous_places(whole: Sequence[int], local: Sequence[int]) -> list[Place]:
    """Return the contiguous parts of a tensor that have a shape, in equal steps, or at its ends."""
    dims: list[list[Index]] = []
    for size, own in zip(whole, local, strict=True):
        starts = range(0, size - own + 1, max(own, 1)) if size % max(own, 1) == 0 else {0, size - own}
        dims.append([None] if own == size else [torch.arange(start, start + own) for start in starts])
    return [Place(tuple(whole), index) for index in product(*dims)]


def _rows_in_any_order(whole: Tensor, local: Tensor) -> Place | None:
    different = [dim for dim, (a, b) in enumerate(zip(whole.shape, local.shape, strict=True)) if a != b]
    for dim in different or range(whole.dim()):
        if any(it != dim for it in different):
            continue
        known: dict[bytes, int] = {}
        for position, row in enumerate(bytes_of_rows(whole, dim)):
            known.setdefault(row, position)
        positions, padding = [], 0
        for row in bytes_of_rows(local, dim):
            if row in known:
                positions.append(known[row])
            elif not any(row):
                padding += 1
            else:
                break
        else:
            if len(positions) + padding == local.shape[dim] and positions:
                index: list[Index] = [None] * whole.dim()
                index[dim] = torch.tensor(positions)
                paddings = [0] * whole.dim()
                paddings[dim] = padding
                return Place(tuple(whole.shape), tuple(index), padding=tuple(paddings) if padding else ())
    return None


def bytes_of_rows(tensor: Tensor, dim: int) -> Iterator[bytes]:
    """Yield the bytes of each position along a dim, by which equal ones are found."""
    for row in tensor.movedim(dim, 0).contiguous().view(tensor.shape[dim], -1):
        yield row.view(torch.uint8).numpy().tobytes()


def _flat(whole: Tensor, local: Tensor) -> list[Place]:
    flat = whole.flatten()
    mark = int(local.abs().argmax()) if local.numel() else 0
    if not local.numel() or not local[mark]:
        return []
    starts = (flat == local[mark]).nonzero().flatten() - mark
    return [
        Place(tuple(whole.shape), (), flat=(start, start + local.numel()))
        for start in starts[:64].tolist()
        if start >= 0 and torch.equal(flat[start : start + local.numel()], local)
    ]


def _ranges(positions: Tensor) -> str:
    """Describe positions by their runs, as in `0..3, 8..11`."""
    values = positions.tolist()
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    shown = [f"{a}..{b}" if b > a else f"{a}" for a, b in runs[:4]]
    return ", ".join(shown) + (", ..." if len(runs) > 4 else "")
