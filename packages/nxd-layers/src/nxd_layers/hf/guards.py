"""What goes wrong unseen with a split model: ties that come apart, and methods that take parts for the whole."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

_METHODS = {
    "save_pretrained": "save a checkpoint instead (neuronx_distributed.save_checkpoint) and export it (nxd export)",
    "resize_token_embeddings": "resize them before the model is parallelized",
}


def ties_of(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def check_ties(model: nn.Module, ties: list[list[str]]) -> None:
    """Raise a ValueError if names of one parameter are now those of several."""
    for tied in ties:
        if len({model.get_parameter(name) for name in tied}) > 1:
            raise ValueError(
                f"{' and '.join(tied)} are one parameter, but the plan splits them apart; leave them out of the plan, "
                "or untie them. The model is changed already, and cannot be used"
            )


def refuse_methods(model: nn.Module) -> None:
    """Have methods of transformers that would take this rank's parts for the whole model raise a RuntimeError."""
    for name, instead in _METHODS.items():
        if hasattr(model, name):
            setattr(model, name, _refusal(name, instead))


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    return partial(_refuse, f"{name}() would take this rank's part for the whole model; {instead}")


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(message)
