"""Where the activations of each rank belong in those of the reference."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nxd_parity.bounds import distance
from nxd_parity.events import TensorEvent
from nxd_parity.parameters import ParameterPlaces
from nxd_parity.places import Place, bytes_of_rows, not_covered, options_by_shape, stated_place, whole_place

MOST_ROWS = 4096
ROUNDED = 0.1  # a share of the largest value that rounding does not exceed
MOST_MOVED = 0.75  # of the rows are in another order, for a tensor to be taken as one with rows in another order


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensors of several calls as one, along dim 0, or the tensor of the only call.

    Calls may differ along one other dim, as batches that are padded to their longest row do; zeros make up for it.
    """
    if len(parts) == 1 or not parts[0].dim():
        return parts[0] if len(parts) == 1 else torch.stack(list(parts))
    if len({it.dim() for it in parts}) > 1:
        return parts[0]
    unequal = [dim for dim in range(1, parts[0].dim()) if len({it.shape[dim] for it in parts}) > 1]
    if len(unequal) > 1:
        return parts[0]
    for dim in unequal:
        longest = max(it.shape[dim] for it in parts)
        behind = (0, 0) * (parts[0].dim() - 1 - dim)
        parts = [torch.nn.functional.pad(it, (*behind, 0, longest - it.shape[dim])) for it in parts]
    return torch.cat(list(parts))


class ActivationPlaces:
    """The places of activations, learned in the order of execution: inputs first.

    A rank's positions in the inputs hold for everything that it computes from them.
    """

    def __init__(self, parameters: ParameterPlaces) -> None:
        """Start with what is known of the parameters: outputs of a layer are where the rows of its weight are."""
        self._parameters = parameters
        self._known: dict[tuple[int, int, int], dict[tuple[int, int], list[Tensor]]] = defaultdict(dict)
        self._of_tensor: dict[tuple[int, str, int, int, int], Place] = {}
        self._padded: set[tuple[int, int, int]] = set()

    def learn(self, rank: int, event: TensorEvent, place: Place) -> None:
        """Remember that a rank's input is at a place."""
        known = self._known[rank, event.step, event.model_call]
        if place.is_padded:
            self._padded.add((rank, event.step, event.model_call))
        for dim, positions in enumerate(place.index):
            if positions is not None:
                _add(known, place.shape[dim], positions)
        if len(place.shape) >= 2:  # models join batch and sequence
            rows, columns = (
                torch.arange(place.shape[dim]) if place.index[dim] is None else place.index[dim] for dim in (0, 1)
            )
            assert rows is not None
            assert columns is not None
            flat = (rows[:, None] * place.shape[1] + columns).flatten()
            if flat.numel() < place.shape[0] * place.shape[1]:
                _add(known, place.shape[0] * place.shape[1], flat)

    def options(self, rank: int, event: TensorEvent, whole: Sequence[int]) -> list[Place]:
        """Return the places where a rank's activation may be, those that follow from its inputs first."""
        known = self._known[rank, event.step, event.model_call]
        if event.placement is not None:
            return _stated(stated_place(event.placement, event.shape), event.shape, whole, known)
        positions = [
            [*known.get((size, own), []), *self._parameters.positions(rank, event.name, size, own)]
            for size, own in zip(whole, event.shape, strict=False)
        ]
        if len(whole) != len(event.shape):
            return []
        if tuple(whole) == event.shape:
            return [whole_place(whole)]
        is_padded = (rank, event.step, event.model_call) in self._padded
        return [replace(it, is_padded=is_padded) for it in options_by_shape(whole, event.shape, positions)]

    def of_inputs(self, rank: int, event: TensorEvent, whole: Sequence[int]) -> Place | None:
        """Return the place that follows from a rank's inputs; None if they leave none, or several."""
        if event.placement is not None or len(whole) != len(event.shape):
            return None
        known = self._known[rank, event.step, event.model_call]
        split = [(size, own) for size, own in zip(whole, event.shape, strict=True) if size != own]
        if not split or any(len(known.get(it, ())) != 1 for it in split):
            return None
        return next(iter(self.options(rank, event, whole)), None)

    def remember(self, rank: int, event: TensorEvent, place: Place) -> None:
        """Remember the place of an activation, for its gradient."""
        self._of_tensor[rank, event.name, event.step, event.call, event.output] = place

    def remembered(self, rank: int, event: TensorEvent) -> Place | None:
        """Return the place of the activation whose gradient this is."""
        return self._of_tensor.get((rank, event.name, event.step, event.call, event.output))


def _stated(
    place: Place, local: Sequence[int], whole: Sequence[int], known: Mapping[tuple[int, int], Sequence[Tensor]]
) -> list[Place]:
    """Return the places that a program states, where dims of which it has a part of the batch are the known ones."""
    rows = [own == stated < size for own, stated, size in zip(local, place.shape, whole, strict=False)]
    if not len(place.shape) == len(whole) == len(local) or not any(rows):
        return [place]
    positions = [
        known.get((size, own), []) if is_part else [] if index is None else [index]
        for is_part, index, size, own in zip(rows, place.index, whole, local, strict=True)
    ]
    options = [
        it
        for it in options_by_shape(whole, local, positions)
        if all(is_part or a is b for is_part, a, b in zip(rows, it.index, place.index, strict=True))
    ]
    return [replace(it, summed_over=place.summed_over) for it in options] or [place]


def exact(options: Sequence[Place], whole: Tensor, local: Tensor) -> Place | None:
    """Return the place where the values are exactly a rank's."""
    return next((it for it in options if torch.equal(it.of(whole), local)), None)


def rows_of(whole: Tensor, local: Tensor) -> Place | None:
    """Return the place of rows that are in the whole tensor in any order; None if one is not."""
    if whole.dim() != local.dim() or not whole.dim() or whole.shape[1:] != local.shape[1:]:
        return None
    positions = _positions_of_rows(whole, local)
    if positions is None:
        return None
    return Place(tuple(whole.shape), (positions, *[None] * (whole.dim() - 1)))


def _positions_of_rows(whole: Tensor, local: Tensor) -> Tensor | None:
    """Return where a rank's rows are in a tensor, the first of equal ones; None if one is not there."""
    known: dict[bytes, int] = {}
    for position, row in enumerate(bytes_of_rows(whole, 0)):
        known.setdefault(row, position)
    positions = [known.get(row) for row in bytes_of_rows(local, 0)]
    return None if any(it is None for it in positions) else torch.tensor(positions)


def padded_rows(whole: Tensor, local: Tensor) -> Place | None:
    """Return the place of rows of tokens that are longer in the whole batch, whose longest row is another.

    None if the rows go on there with more than padding, or one is not there.
    """
    if whole.dim() != local.dim() or whole.dim() < 2 or whole.shape[2:] != local.shape[2:]:
        return None
    length = local.shape[1]
    if not 0 < length < whole.shape[1]:
        return None
    shorter, rest = whole[:, :length], whole[:, length:]
    is_padding = (rest.diff(dim=1) != 0).flatten(1).sum(1) <= 1  # that of its batch, and zeros behind it
    padded = is_padding.nonzero().flatten()
    positions = _positions_of_rows(shorter[padded], local) if len(padded) else None
    if positions is None:
        return None
    others: list[Tensor | None] = [None] * (whole.dim() - 2)
    return Place(tuple(whole.shape), (padded[positions], torch.arange(length), *others), is_padded=True)


def nearest_rows(whole: Tensor, local: Tensor, *, once: bool) -> Place | None:
    """Return the place of rows in any order by the nearest values: experts get tokens in such an order.

    Args:
        whole: the whole tensor.
        local: the rank's tensor.
        once: whether each row of the whole may be there once; if it is not, the place is None.
    """
    fits = whole.dim() == local.dim() == 2 and whole.shape[1] == local.shape[1] and local.shape[0] <= MOST_ROWS
    if not fits or not local.numel() or whole.shape[0] > 16 * MOST_ROWS:
        return None
    positions = torch.cdist(local.double().nan_to_num(), whole.double().nan_to_num(), p=float("inf")).argmin(1)
    if once and len(positions.unique()) < len(positions):
        return None
    return Place(tuple(whole.shape), (positions, None))


def in_order_of(whole: Tensor, noisy: Tensor) -> Tensor:
    """Return a tensor with the rows in the order of another's, if most rows are near ones of the other elsewhere.

    Noise that sends a token to another expert moves the rows of all that follow.
    """
    near = ROUNDED * float(whole.double().abs().max()) if whole.dim() == 2 and whole.numel() else 0.0
    if not near or not whole.is_floating_point() or distance(whole, noisy).largest <= near:
        return noisy
    rows = nearest_rows(noisy, whole, once=False)
    if rows is None:
        return noisy
    ordered = rows.of(noisy)
    is_near = ((ordered.double() - whole.double()).abs().amax(1) <= near).double().mean()
    return ordered if is_near >= MOST_MOVED else noisy


def groups_of(world: int, known: Sequence[Sequence[int]] = ()) -> Iterator[tuple[int, ...]]:
    """Yield groups of ranks over which values may be added up: known ones, then every regular one."""
    seen = set()
    regular = [
        tuple(range(start, start + size * stride, stride))
        for size in range(world, 1, -1)
        if world % size == 0
        for stride in (1, world // size)
        for start in range(world)
        if (start % (size * stride)) < stride and start + (size - 1) * stride < world
    ]
    for group in [*map(tuple, known), *regular]:
        if len(group) > 1 and group not in seen:
            seen.add(group)
            yield group


def scale_of(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the factor that brings one tensor nearest to another, and how far it then is, relative to its size."""
    wanted, got = expected.double().flatten(), found.double().flatten()
    size = float(wanted @ wanted)
    if not size or not bool(got.isfinite().all()):
        return 1.0, float("inf")
    factor = float(got @ wanted) / size
    rest = distance(factor * wanted, got)
    largest = float((factor * wanted).abs().max())
    return factor, rest.largest / largest if largest else float("inf")


def data_problem(places: Sequence[Place | None], whole: Sequence[int]) -> str:
    """Say what is wrong with the ranks' parts of the inputs: not all rows are there, or they are in another order.

    An empty text if they are all of the inputs.
    """
    known = [it for it in places if it is not None]
    if len(known) < len(places) or not whole:
        return ""
    missing = not_covered(known, whole)
    if missing is not None:
        return f"no rank has row {missing[0]} of the reference's inputs"
    orders = {tuple(it.index[0].tolist()) if it.index[0] is not None else () for it in known}
    is_whole = all(it.index[0] is None or len(it.index[0]) == whole[0] for it in known)
    return "ranks have the rows of the inputs in different orders" if is_whole and len(orders) > 1 else ""


def without_repeated_bias(total: Tensor, expected: Tensor) -> Tensor:
    """Return a sum over ranks without what is the same in all rows: each rank added a bias that is to be added once."""
    if total.dim() < 2:
        return total
    return total - (total - expected).flatten(0, -2).mean(0)


def _add(known: dict[tuple[int, int], list[Tensor]], size: int, positions: Tensor) -> None:
    options = known.setdefault((size, len(positions)), [])
    if not any(torch.equal(it, positions) for it in options):
        options.append(positions)
