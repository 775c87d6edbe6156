"""The names that modules and parameters have in the reference, where a candidate has others.

A stage of a pipeline often counts its layers from 0. Initial values tell which parameter of the reference each of its
parameters is, and modules follow their parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity.events import TensorEvent
from nxd_parity.places import place_of_parameter, stated_place
from nxd_parity.recording import Recording
from nxd_parity.sequence import owner_of

Model = tuple[int, int]  # a rank, and which of the models that it calls


@dataclass(frozen=True)
class Names:
    """The names that a model's parts have in the reference.

    Attributes:
        parameters: those of its parameters, by their own.
        modules: those of modules, by their own; what is inside them follows.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, event: TensorEvent) -> TensorEvent:
        """Return an event of the model with the names that the reference has."""
        if event.kind in (events.PARAMETER, events.GRADIENT):
            return replace(event, name=self.parameters.get(event.name, event.name))
        if event.kind == events.OPTIMIZER_STATE:
            parameter, slash, key = event.name.rpartition("/")
            return replace(event, name=f"{self.parameters.get(parameter, parameter)}{slash}{key}")
        if event.kind in (events.INPUT, events.ACTIVATION, events.ACTIVATION_GRADIENT):
            return replace(event, name=self.module(event.name), inputs=tuple(map(self.module, event.inputs)))
        return event

    def is_around(self, event: TensorEvent) -> bool:
        """Whether a tensor is an output of something around the model, such as a module that computes the loss."""
        is_output = event.kind in (events.ACTIVATION, events.ACTIVATION_GRADIENT)
        return is_output and not event.name and "" not in self.modules and "" in self.modules.values()

    def module(self, name: str) -> str:
        """Return a module's name in the reference: by the nearest module around it whose name is known."""
        around = name
        while around not in self.modules:
            if not around:
                return name
            around = owner_of(around)
        inside = name[len(around) :].lstrip(".")
        return ".".join(filter(None, (self.modules[around], inside)))


def infer_names(reference: Recording, candidate: Recording) -> dict[Model, Names]:
    """Find the names of the candidate's models whose names are others than the reference's.

    Args:
        reference: a recording of one process.
        candidate: the recording whose names are to be found.

    Returns:
        the names of each model that has other ones; none if the ranks together have each parameter of the reference by
        its name, or no values show what a parameter is.
    """
    wanted = _initial(reference.tensors[0])
    of_models: dict[Model, list[TensorEvent]] = defaultdict(list)
    for rank, tensors in enumerate(candidate.tensors):
        for event in _initial(tensors):
            of_models[rank, event.model].append(event)
    if {it.name for it in wanted} <= {it.name for found in of_models.values() for it in found}:
        return {}
    search = _Search(reference, candidate, wanted)
    names = {}
    for (rank, model), parameters in of_models.items():
        found = search.names(rank, parameters)
        if found is not None:
            names[rank, model] = found
    return names


def rename(candidate: Recording, names: Mapping[Model, Names]) -> None:
    """Give the tensors of models the names that the reference has; calls of a module are counted anew."""
    for rank, tensors in enumerate(candidate.tensors):
        if any(of_rank == rank for of_rank, _ in names):
            renamed = []
            for event in tensors:
                of_model = names.get((rank, event.model))
                if of_model is None:
                    renamed.append(event)
                elif not of_model.is_around(event):
                    renamed.append(of_model.renamed(event))
            candidate.replace_tensors(rank, _with_calls(renamed))


def _with_calls(tensors: list[TensorEvent]) -> list[TensorEvent]:
    """Count the calls of each module in each step from 0; losses have calls of their own."""
    calls: dict[tuple[int, str, bool], set[int]] = defaultdict(set)
    for event in tensors:
        calls[event.step, event.name, event.kind == events.LOSS].add(event.call)
    number = {key: {call: at for at, call in enumerate(sorted(it))} for key, it in calls.items()}
    return [replace(it, call=number[it.step, it.name, it.kind == events.LOSS][it.call]) for it in tensors]


def _initial(tensors: Iterable[TensorEvent]) -> list[TensorEvent]:
    """Return the first recorded values of each model's parameters."""
    first: dict[tuple[int, str], TensorEvent] = {}
    for event in tensors:
        if event.kind == events.PARAMETER:
            first.setdefault((event.model, event.name), event)
    return list(first.values())


class _Search:
    """Finds which parameters of the reference those of a model are."""

    def __init__(self, reference: Recording, candidate: Recording, wanted: list[TensorEvent]) -> None:
        self._candidate, self._wanted = candidate, wanted
        self._by_digest: dict[tuple[str, torch.dtype, tuple[int, ...]], list[str]] = defaultdict(list)
        for event in wanted:
            self._by_digest[event.digest, event.dtype, event.shape].append(event.name)
        self._modules = {it.name for it in reference.tensors[0] if it.kind == events.ACTIVATION}
        self._owners = {owner_of(it.name) for it in wanted}
        self._read: Callable[[TensorEvent], Tensor] = lru_cache(maxsize=64)(lambda event: reference.read(0, event))

    def names(self, rank: int, parameters: list[TensorEvent]) -> Names | None:
        """Return the names of a model's parts; None if they are those of the reference, or more of its values are."""
        options = {it.name: self._options(rank, it) for it in parameters}
        same = sum(name in found for name, found in options.items())
        known = {name: found[0] for name, found in options.items() if len(found) == 1}
        by_module = Names(modules=self._modules_of(known))
        for name, found in options.items():
            if len(found) > 1:
                owner, _, leaf = name.rpartition(".")
                likely = ".".join(filter(None, (by_module.module(owner), leaf)))
                known[name] = next((it for it in (likely, name) if it in found), found[0])
        return Names(known, self._modules_of(known)) if len(known) > same else None

    def _options(self, rank: int, event: TensorEvent) -> list[str]:
        """Return the parameters of the reference whose values, or a part of them, a parameter has."""
        whole = self._by_digest.get((event.digest, event.dtype, event.shape))
        if whole is not None and event.placement is None:
            return whole
        local, leaf = self._candidate.read(rank, event), event.name.rpartition(".")[2]
        return [it.name for it in self._wanted if it.name.rpartition(".")[2] == leaf and self._has(it, event, local)]

    def _has(self, wanted: TensorEvent, event: TensorEvent, local: Tensor) -> bool:
        """Whether a tensor is a proper part of a parameter, or a stated one."""
        if event.placement is not None:
            is_alike = event.placement.shape == wanted.shape and event.dtype == wanted.dtype
            return is_alike and torch.equal(stated_place(event.placement, event.shape).of(self._read(wanted)), local)
        if event.dtype != wanted.dtype or event.shape == wanted.shape or not local.numel():
            return False
        return bool(place_of_parameter(self._read(wanted), local))

    def _modules_of(self, parameters: Mapping[str, str]) -> dict[str, str]:
        """Return modules' names by those of their parameters; a module around several follows if they agree."""
        found: dict[str, set[str]] = defaultdict(set)
        for own, wanted in parameters.items():
            module, other = owner_of(own), owner_of(wanted)
            if module != other and module in self._modules and module not in self._owners:
                continue  # a parameter that two modules of the reference share has the name of one
            found[module].add(other)
            while module and other and module.rpartition(".")[2] == other.rpartition(".")[2]:
                module, other = owner_of(module), owner_of(other)
                found[module].add(other)
        return {module: next(iter(others)) for module, others in found.items() if len(others) == 1}
