"""Loading the states of parameters into an optimizer, in the dtypes and on the devices in which it keeps them."""

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer


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
        optimizer.load_state_dict({"state": by_index, "param_groups": own["param_groups"]})
    except KeyError as error:
        keys = sorted({key for state in by_index.values() for key in state})
        raise ValueError(
            f"{type(optimizer).__name__} has a state {error.args[0]!r}, and those given are {keys}; they are of an "
            "optimizer of another class"
        ) from error
