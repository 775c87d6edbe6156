"""Where the parameters of each rank, their gradients and optimizer states, belong in those of the reference."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

import torch
from torch import Tensor

from nxd_parity.events import TensorEvent
from nxd_parity.places import (
    Place,
    contiguous_places,
    nearest,
    not_covered,
    place_of_parameter,
    stated_place,
    whole_place,
)
from nxd_parity.sequence import owner_of

MOST_POSITIONS = 4


class ParameterPlaces:
    """The places of parameters: stated by DTensors, by a rule of the user, or found by their initial values."""

    def __init__(self, world_size: int, shards: Mapping[str, int]) -> None:
        """Start with nothing known.

        Args:
            world_size: the candidate's number of ranks.
            shards: rules, from patterns of names to the dim along which ranks have equal parts, in their order.
        """
        self._world, self._shards = world_size, shards
        self._places: dict[tuple[int, str], Place] = {}
        self._positions: dict[int, dict[tuple[int, int], dict[str, Tensor]]] = defaultdict(dict)
        self.inferred: dict[str, str] = {}  # parameters by name, and where the ranks have their parts
        self.problems: dict[str, str] = {}  # parameters whose ranks' parts are not all of it
        self.unused_rules = set(shards)  # patterns that no parameter without a known place has matched

    def learn(
        self, name: str, whole: Tensor, values: Mapping[int, Tensor], recorded: Mapping[int, TensorEvent]
    ) -> None:
        """Find the places of a parameter on all ranks that have it.

        Args:
            name: the parameter's.
            whole: its initial values in the reference.
            values: those of the candidate's ranks.
            recorded: their events.
        """
        found = {}
        for number, (rank, local) in enumerate(sorted(values.items())):
            placement = recorded[rank].placement
            if placement is not None:
                self._places[rank, name] = stated_place(placement, local.shape)
                continue
            place = self._by_rule(name, whole, local, number) or self._by_values(name, whole, local, rank, number)
            if place is None:
                continue
            self._places[rank, name] = place
            if local.shape != whole.shape:
                found[rank] = str(place)
        if found:
            self.inferred[name] = "; ".join(f"rank {rank}: {it}" for rank, it in found.items())
        known = [it for rank in values if (it := self._remembered(rank, name)) is not None]
        if len(known) == len(values):
            self._check_coverage(name, whole.shape, known)

    def _remembered(self, rank: int, name: str) -> Place | None:
        """Return a rank's place of a parameter, and remember it for the activations of the parameter's module."""
        place = self._places.get((rank, name))
        if place is not None:
            self._remember_positions(rank, name, place)
        return place

    def _remember_positions(self, rank: int, name: str, place: Place) -> None:
        for size, positions in zip(place.shape, place.index, strict=False):
            if positions is not None:
                self._positions[rank].setdefault((size, len(positions)), {})[name] = positions

    def learn_stated(self, name: str, whole: Sequence[int], recorded: Sequence[tuple[int, TensorEvent]]) -> None:
        """Learn the places of a parameter where the program states them, on a rank perhaps several boxes.

        Args:
            name: the parameter's.
            whole: its shape in the reference.
            recorded: the ranks' events, all with placements.
        """
        places = []
        for rank, event in recorded:
            if event.placement is not None and event.placement.shape == tuple(whole):
                place = stated_place(event.placement, event.shape)
                places.append(place)
                self._places[rank, name] = place
                self._remember_positions(rank, name, place)
        self._check_coverage(name, whole, places)

    def is_split(self, module: str) -> bool:
        """Whether ranks have parts of a module's own parameters."""
        return any(owner_of(name) == module and not place.is_whole for (_, name), place in self._places.items())

    def learn_again(self, name: str, rank: int, whole: Tensor, local: Tensor) -> Place | None:
        """Find the place of a parameter that has another shape than at first, by the nearest values."""
        if whole.dim() != local.dim() or any(a < b for a, b in zip(whole.shape, local.shape, strict=True)):
            return None
        place = nearest(contiguous_places(whole.shape, local.shape), whole, local)
        if place is not None:
            self._places[rank, name] = place
        return place

    def place(self, name: str, rank: int, event: TensorEvent, whole: tuple[int, ...]) -> Place | None:
        """Return the place of a parameter, or of its gradient or optimizer state; None if it is not known."""
        if event.placement is not None:
            return stated_place(event.placement, event.shape)
        if not event.shape and not whole:
            return whole_place(())
        known = self._places.get((rank, name)) or self._places.get((rank, name.rpartition("/")[0]))
        if known is not None and known.shape == whole:
            return known
        return whole_place(whole) if event.shape == whole else None

    def positions(self, rank: int, module: str, size: int, own: int) -> list[Tensor]:
        """Return where a rank has `own` of `size` positions in its parameters, those of a module first."""
        found: list[Tensor] = []
        for name, index in sorted(
            self._positions[rank].get((size, own), {}).items(), key=lambda it: owner_of(it[0]) != module
        ):
            if name and not any(torch.equal(index, it) for it in found):
                found.append(index)
        return found[:MOST_POSITIONS]

    def _by_rule(self, name: str, whole: Tensor, local: Tensor, number: int) -> Place | None:
        pattern = next((it for it in self._shards if fnmatch(name, it)), None)
        self.unused_rules.discard(pattern)
        dim = None if pattern is None else self._shards[pattern]
        if dim is None or local.dim() != whole.dim() or not -whole.dim() <= dim < whole.dim():
            return None
        size = local.shape[dim]
        parts = max(whole.shape[dim] // size, 1)
        start = number % parts * size
        index: list[Tensor | None] = [None] * whole.dim()
        index[dim] = torch.arange(start, min(start + size, whole.shape[dim]))
        return Place(tuple(whole.shape), tuple(index))

    def _by_values(self, name: str, whole: Tensor, local: Tensor, rank: int, number: int) -> Place | None:
        options = place_of_parameter(whole, local)
        if len(options) <= 1:
            return options[0] if options else None
        # Values repeat, as those of a bias of zeros: it is where the module's other parameter is, or in order.
        beside = self._beside(name, rank, whole.shape[0], local.shape[0])
        if beside is not None and options[0].flat is None:
            place = Place(tuple(whole.shape), (beside, *options[0].index[1:]))
            if place.local_shape == tuple(local.shape) and torch.equal(place.of(whole), local):
                return place
        return options[number % len(options)]

    def _beside(self, name: str, rank: int, size: int, own: int) -> Tensor | None:
        """Return the positions along dim 0 of another parameter of the module."""
        for (of_rank, other), place in self._places.items():
            if of_rank == rank and owner_of(other) == owner_of(name) and other != name and place.index:
                first = place.index[0]
                if first is not None and place.shape[0] == size and len(first) == own:
                    return first
        return None

    def _check_coverage(self, name: str, whole: Sequence[int], places: Sequence[Place]) -> None:
        """Note a parameter whose parts on all ranks are not all of it: a part is loaded twice, another never."""
        missing = not_covered(places, whole)
        if missing is not None:
            self.problems[name] = f"no rank has the values at {list(missing)}, and some values are on several ranks"
