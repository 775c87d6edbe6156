"""The parts of a multimodal model outside of its language model: towers that read images or sounds, and projectors.

They are found by what transformers says of the model (its decoder, its embeddings and its head), not by names. Here
they are frozen, or left out of a model that only sees text.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import nn

from nxd_layers.hf.transformers_models import input_embeddings, output_embeddings, text_config


def find_towers(model: Any) -> list[str]:
    """Return the paths of the largest modules, and of single parameters, outside of a model's language model.

    Args:
        model: a model of transformers, which may be on the meta device.

    Returns:
        The paths in the model's order, such as ["model.vision_tower", "model.multi_modal_projector"]; empty for a
        model of text alone, and for one that names no decoder.
    """
    if text_config(model) is getattr(model, "config", None):
        return []
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        return []
    parts = (decoder, input_embeddings(model), output_embeddings(model))
    return list(_outside(model, "", [part for part in parts if part is not None]))


def _outside(module: nn.Module, path: str, kept: Sequence[nn.Module]) -> Iterator[str]:
    if any(part is module for part in kept):
        return
    inner = set(module.modules())
    if not any(part in inner for part in kept):
        if any(True for _ in module.parameters()):
            yield path
        return
    prefix = f"{path}." if path else ""
    for name, _ in module.named_parameters(recurse=False):
        yield prefix + name
    for name, child in module.named_children():
        yield from _outside(child, prefix + name, kept)


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
