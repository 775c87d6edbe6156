"""The order in which two recordings are compared: that of execution, so that the first difference is the cause."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from nxd_parity import events
from nxd_parity.events import TensorEvent


class Key(NamedTuple):
    """What a tensor is: the same in both recordings, whatever the ranks and calls."""

    step: int
    kind: str
    name: str
    output: int


def key_of(event: TensorEvent) -> Key:
    """Return the key of an event."""
    return Key(event.step, event.kind, event.name, event.output)


def by_key(tensors: Sequence[TensorEvent]) -> dict[Key, list[TensorEvent]]:
    """Return a rank's tensors by what they are, several calls of a module in their order."""
    found: dict[Key, list[TensorEvent]] = defaultdict(list)
    for event in tensors:
        found[key_of(event)].append(event)
    return {key: sorted(calls, key=lambda it: it.call) for key, calls in found.items()}


def execution_order(tensors: Sequence[TensorEvent]) -> list[Key]:
    """Return the keys of a rank's tensors in the order in which they are compared.

    In each step: inputs and activations as they came, losses, gradients of activations as they came, each followed by
    those of the module's own parameters; then norms, optimizer states and parameters.
    """
    steps: dict[int, list[TensorEvent]] = defaultdict(list)
    for event in tensors:
        steps[event.step].append(event)
    return [key for step in sorted(steps) for key in _order_in_step(steps[step])]


def _order_in_step(tensors: Sequence[TensorEvent]) -> list[Key]:
    of_kind: dict[str, list[TensorEvent]] = defaultdict(list)
    for event in tensors:
        of_kind[event.kind].append(event)
    forward = sorted([*of_kind[events.INPUT], *of_kind[events.ACTIVATION]], key=lambda it: it.order)
    keys = [key_of(it) for it in [*forward, *of_kind[events.LOSS]]]
    keys += _backward(of_kind[events.ACTIVATION_GRADIENT], of_kind[events.GRADIENT])
    for kind in (events.GRADIENT_NORM, events.OPTIMIZER_STATE, events.PARAMETER):
        keys += [key_of(it) for it in of_kind[kind]]
    return list(dict.fromkeys(keys))


def _backward(of_modules: Sequence[TensorEvent], of_parameters: Sequence[TensorEvent]) -> list[Key]:
    """Put each parameter's gradient behind that of its module's output."""
    owned: dict[str, list[Key]] = defaultdict(list)
    for event in reversed(of_parameters):
        owned[owner_of(event.name)].append(key_of(event))
    keys: list[Key] = []
    last = {event.name: index for index, event in enumerate(of_modules)}
    for index, event in enumerate(of_modules):
        keys.append(key_of(event))
        if last[event.name] == index:
            keys += owned.pop(event.name, [])
    return keys + [key for rest in owned.values() for key in rest]


def owner_of(parameter: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter.rpartition(".")[0]


def modules_around(name: str) -> list[str]:
    """Return the modules that a module or parameter is inside of, without the whole model, the outermost first."""
    return [name[:end] for end, letter in enumerate(name) if letter == "."]
