"""Aliases: the tensors of a model that are state, which the workers keep and each call updates in place."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Alias:
    """One state tensor.

    Attributes:
        name: name of the parameter or buffer that holds it.
        output: index of the model's (flattened) output that is its new value; that output is not returned to callers.
            None if `forward` writes into the tensor itself or assigns a new tensor to the buffer.
    """

    name: str
    output: int | None


def read_aliases(model: nn.Module, aliases: Any) -> list[Alias]:
    """Normalize the aliases that `func` returned with the model.

    Args:
        model: the model that the aliases belong to.
        aliases: a mapping from state to output index (or None), or just the state that `forward` updates in place.
            State is a parameter or buffer of the model, or its name.

    Raises:
        TypeError: `aliases` has none of these forms.
        ValueError: the model lacks a tensor or name, or a state or output appears twice.
    """
    if aliases is None:
        return []
    if not isinstance(aliases, Mapping | Iterable) or isinstance(aliases, str | Tensor):
        raise TypeError(
            f"func returned aliases of type {type(aliases).__name__}; expected a dict of state to output index, "
            "or a list of the state that forward updates in place"
        )
    pairs = aliases.items() if isinstance(aliases, Mapping) else [(state, None) for state in aliases]
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    known = {name for name, _ in named_tensors(model)}
    found = [Alias(_name_of(state, names, known), _check_output(output)) for state, output in pairs]
    outputs = [f"output {alias.output}" for alias in found if alias.output is not None]
    named = [*(f"state {alias.name!r}" for alias in found), *outputs]
    twice = {what for what in named if named.count(what) > 1}
    if twice:
        raise ValueError(f"the aliases have {', '.join(sorted(twice))} twice; name each once")
    return found


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers; each tensor once, under its first name."""
    return [*model.named_parameters(), *model.named_buffers()]


def _name_of(state: Any, names: dict[int, str], known: set[str]) -> str:
    if isinstance(state, str) and state in known:
        return state
    if isinstance(state, Tensor) and id(state) in names:
        return names[id(state)]
    what = repr(state) if isinstance(state, str) else f"a {type(state).__name__}"
    raise ValueError(
        f"the aliases name {what}, which is not a parameter or buffer of the model; register it with "
        "register_buffer, and alias it by name or as the tensor itself"
    )


def _check_output(output: Any) -> int | None:
    if output is not None and (not isinstance(output, int) or isinstance(output, bool) or output < 0):
        raise TypeError(f"the aliases map to {output!r}; expected an output's index, or None for in-place updates")
    return output
