"""States of parameters as tensors, and back into an optimizer, in the dtypes and on the devices in which it keeps them.

An optimizer may count its steps in a Python number. Checkpoints hold it as a scalar of 64 bits, which torch's own
optimizers, whose "step" is a float, have for nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer


def state_tensor(value: object, key: str, parameter: str) -> Tensor:
    """A state of a parameter as a tensor; `key` and `parameter` say in an error which it is.

    Raises:
        ValueError: it is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    raise ValueError(
        f"optimizer state {key!r} of {parameter} is a {type(value).__name__}; only tensors and numbers can be saved"
    )


def restore_numbers(optimizer: Optimizer) -> None:
    """Make Python numbers of the whole ones that `give_states` brought as tensors, once these have been filled."""
    for state in optimizer.state.values():
        state.update(
            {
                key: int(value)
                for key, value in state.items()
                if isinstance(value, Tensor) and value.dtype == torch.int64 and not value.dim()
            }
        )


def give_states(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Replace an optimizer's states, by its own `load_state_dict`.

    `load_state_dict` converts states of another dtype: torch's optimizers use the parameter's dtype, except for "step".

    Args:
        optimizer: keeps its settings.
        states: by parameter and key; parameters that are not among them begin anew. What needs no conversion is taken
            as it is, not copied.

    Raises:
        ValueError: they are not those of such an optimizer.
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
        optimizer.load_state_dict({**own, "state": by_index})  # a state_dict of its own may hold more
    except KeyError as error:
        keys = sorted({key for state in by_index.values() for key in state})
        raise ValueError(
            f"{type(optimizer).__name__} has a state {error.args[0]!r}, and those given are {keys}; they are of an "
            "optimizer of another class"
        ) from error
