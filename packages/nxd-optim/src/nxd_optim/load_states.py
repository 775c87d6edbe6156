"""Converts states of parameters to tensors and back, in the dtypes and on the devices in which an optimizer keeps them.

An optimizer may count its steps in a Python number. Checkpoints store it as a 64-bit scalar, which torch's own
optimizers, whose "step" is a float, never use.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer


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
        state.update(
            {
                key: int(value)
                for key, value in state.items()
                if isinstance(value, Tensor) and value.dtype == torch.int64 and not value.dim()
            }
        )


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
