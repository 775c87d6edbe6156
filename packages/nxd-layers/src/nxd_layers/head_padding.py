"""`pad_model`: adds attention heads of zeros until the tensor-parallel degree divides their number.

This module decides which layers are padded; a layer's own `pad_heads` pads its weights.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar, runtime_checkable

from nxd_state import active_group, get_shard_spec
from torch import nn

from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.padding import get_number_of_extra_heads

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@runtime_checkable
class PaddableLayer(Protocol):
    """The interface of layers with a split dim that can be padded."""

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Raise what `pad_heads` would raise, and change nothing."""

    def pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Pad the split dim to what it would be if the model had `padded_num_heads` instead of `num_heads`."""


def pad_model(
    model: ModuleT,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Iterable[type[nn.Module]] = (),
    pad_hook_fn: Callable[[nn.Module, float], object] | None = None,
) -> ModuleT:
    """Pad a model's attention heads to the next multiple of the tensor-parallel degree, in place.

    The split dim of every column- and row-parallel layer within the wrapped classes grows by the ratio of the head
    counts. The padding is zeros, after the last head; outputs, and gradients of all real weights, are those of the
    unpadded model. Weights keep their values but may move to other ranks: one all-gather per weight, whose whole is
    held for that moment. A layer that was built with `pad=True` (because its size does not divide either) is padded
    further, to whole heads. Calling it again changes nothing, so several classes can be padded one after another.

    Args:
        model: built at its real sizes. Gradients and optimizer state must not exist yet.
        tp_degree: the tensor-parallel degree of the current mesh.
        n_heads: attention (query) heads of the model over all ranks.
        wrapped_classes: pad the layers within modules of these classes only, typically the attention; all if empty.
            What is tied to something unpadded, such as a head that shares the embedding's table, must be left out.
        pad_hook_fn: called as `pad_hook_fn(module, tgt_src_ratio)` with each module of a wrapped class (with every
            module if there are none), and padded heads by heads, to adapt what the module knows about sizes.

    Returns:
        The model itself.

    Raises:
        ValueError: `tp_degree` is not the current one, no module is of a wrapped class, a layer cannot be padded by
            the ratio, or is tied to one that is not. The model is then unchanged.
        RuntimeError: a weight to pad has a gradient already.
    """
    group = active_group("tp")
    if tp_degree != group.size:
        raise ValueError(
            f"tp_degree={tp_degree} is not the current tensor_model_parallel_size={group.size}; pass the latter, "
            "after initialize_model_parallel()"
        )
    padded_n_heads = n_heads + get_number_of_extra_heads(n_heads, tp_degree)
    wrapped = _modules_of(model, tuple(wrapped_classes))
    if padded_n_heads != n_heads:
        layers = _layers_within(model, wrapped)
        _check_not_shared(model, layers)
        for layer in layers:  # check all of them first: a model that cannot be padded is left unchanged
            layer.check_pad_heads(n_heads, padded_n_heads)
        for layer in layers:
            layer.pad_heads(n_heads, padded_n_heads)
    if pad_hook_fn is not None:
        for module in wrapped:
            pad_hook_fn(module, padded_n_heads / n_heads)
    return model


def _modules_of(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    if not classes:
        return list(model.modules())
    found = [module for module in model.modules() if isinstance(module, classes)]
    if not found:
        names = ", ".join(cls.__name__ for cls in classes)
        raise ValueError(
            f"no module of {type(model).__name__} is of a wrapped class ({names}); name a class that it contains"
        )
    return found


def _layers_within(model: nn.Module, wrapped: Iterable[nn.Module]) -> list[PaddableLayer]:
    inside = {module for root in wrapped for module in root.modules()}
    layers: list[PaddableLayer] = []
    for name, module in model.named_modules():
        if module not in inside or isinstance(module, ParallelEmbedding):
            continue
        if hasattr(module, "lora"):
            raise ValueError(f"{name} has a LoRA adapter, which cannot be padded; pad the model before wrapping it")
        if isinstance(module, PaddableLayer):
            layers.append(module)
        elif any(get_shard_spec(parameter) for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which is split over the ranks but cannot be padded; remove its "
                "class from wrapped_classes"
            )
    return layers


def _check_not_shared(model: nn.Module, layers: Iterable[PaddableLayer]) -> None:
    """A weight that another module reads as well cannot change its shape, and a gradient would keep its own."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    to_pad = {parameter for layer in layers if isinstance(layer, nn.Module) for parameter in layer.parameters(False)}
    for parameter in to_pad:
        names = owners[parameter]
        if get_shard_spec(parameter) is None:
            continue
        if len(names) > 1:
            raise ValueError(
                f"{names[0]} is tied to {', '.join(names[1:])}, and cannot be padded on its own; pass wrapped_classes, "
                "such as the attention's class, without it"
            )
        if parameter.grad is not None:
            raise RuntimeError(f"{names[0]} has a gradient already; pad the model before its first backward")
