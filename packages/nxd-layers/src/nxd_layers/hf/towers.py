"""The parts of a multimodal model outside of its language model: towers that read images or sounds, and projectors.

`nxd_state.find_towers` finds them. Here they are frozen, or left out of a model that only sees text.
"""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn


def freeze(model: nn.Module, paths: Sequence[str]) -> None:
    """Stop the training of the modules and parameters at these paths."""
    for path in paths:
        _at(model, path).requires_grad_(False)


def count_parameters(model: nn.Module, paths: Sequence[str]) -> int:
    """Return the number of elements of the parameters at these paths."""
    found = (_at(model, path) for path in paths)
    parameters = {it for part in found for it in ([part] if isinstance(part, nn.Parameter) else part.parameters())}
    return sum(math.prod(it.shape) for it in parameters)


def leave_out(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Remove the modules at these paths from a model that will see text alone, and freeze the parameters there.

    A module leaves a stand-in without parameters, which raises a ValueError when it is called. Single parameters are
    small, and models of transformers set their initial values without looking whether they are there.

    Returns:
        The paths of the removed modules.
    """
    removed = [path for path in paths if not isinstance(_at(model, path), nn.Parameter)]
    for path in removed:
        outer, _, name = path.rpartition(".")
        model.get_submodule(outer)._modules[name] = LeftOut(path)
    freeze(model, [path for path in paths if path not in removed])
    return removed


class LeftOut(nn.Module):
    """Stands where a tower was that was left out."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a ValueError: the weights are not here."""
        raise ValueError(
            f"{self.path} was left out of this model, which therefore takes text alone; build the model with it to "
            "pass images or sounds (in a recipe: model.towers=frozen)"
        )

    def extra_repr(self) -> str:
        """Return the path, which printing a model shows."""
        return repr(self.path)


def _at(model: nn.Module, path: str) -> Any:
    outer, _, name = path.rpartition(".")
    return getattr(model.get_submodule(outer), name)
