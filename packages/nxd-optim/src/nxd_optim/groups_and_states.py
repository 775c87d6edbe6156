"""Parameter groups and states of any torch optimizer.

An optimizer may count its steps in a Python number. Checkpoints store it as a 64-bit scalar, which torch's own
optimizers, whose "step" is a float, never use.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def parameter_groups(model: nn.Module, weight_decay: float, *, no_decay: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into those with weight decay and those without.

    Biases and norm weights, which have one dim, never decay (Loshchilov and Hutter 2019 decay only weights of linear
    maps, as do GPT-2 and its successors). This works on shards as well, because sharding keeps the number of dims.

    Args:
        model: the model; tied parameters are listed once, frozen ones are skipped.
        weight_decay: weight decay of the first group.
        no_decay: components of names ("embed_tokens") of further modules or parameters without decay.

    Returns:
        `[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]`, without empty
        groups.

    Raises:
        ValueError: a component in `no_decay` occurs in no parameter's name.
    """
    components = {part for name, _ in model.named_parameters() for part in name.split(".")}
    for wanted in no_decay:
        if wanted not in components:
            near = difflib.get_close_matches(wanted, sorted(components), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the model has {sorted(components)}"
            raise ValueError(f"no_decay={wanted!r} occurs in no parameter's name{hint}")
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim < 2 or not set(no_decay).isdisjoint(name.split("."))
            (plain if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_settings(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the settings of each source group to its target."""
    for source, target in zip(sources, targets, strict=True):
        target.update(settings_of(source))


def copy_changed_settings(
    after: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]
) -> None:
    """Copy the settings that an optimizer has changed in its groups, such as a number of steps, to other groups."""
    for new, old, target in zip(after, before, targets, strict=True):
        target.update({key: it for key, it in settings_of(new).items() if key not in old or it is not old[key]})


def state_tensor(value: object, key: str, parameter: str) -> Tensor:
    """Return a state of a parameter as a tensor; `key` and `parameter` identify it in errors.

    Raises:
        ValueError: the state is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    raise ValueError(
        f"optimizer state {key!r} of {parameter} is a {type(value).__name__}; only tensors and numbers can be saved"
    )


def restore_numbers(optimizer: Optimizer) -> None:
    """Convert whole numbers that `give_states` loaded as tensors back to Python numbers, once they are filled."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype == torch.int64 and not value.dim():
                state[key] = int(value)


def give_states(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Replace an optimizer's states through its own `load_state_dict`.

    `load_state_dict` converts states of another dtype: torch's optimizers use the parameter's dtype, except for "step".

    Args:
        optimizer: the optimizer; its settings do not change.
        states: states by parameter and key; other parameters start without state. Tensors that need no conversion are
            not copied.

    Raises:
        ValueError: the states belong to another class of optimizer.
    """
    own = optimizer.state_dict()
    indices = [index for group in own["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_index = {
        index: dict(states[parameter])
        for index, parameter in zip(indices, parameters, strict=True)
        if states.get(parameter)
    }
    try:
        optimizer.load_state_dict({**own, "state": by_index})  # a subclass's state_dict may hold more
    except KeyError as error:
        keys = sorted({key for state in by_index.values() for key in state})
        raise ValueError(
            f"{type(optimizer).__name__} has a state {error.args[0]!r}, but the given states are {keys}; they "
            "belong to another class of optimizer"
        ) from error
