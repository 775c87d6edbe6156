"""Layers that PEFT has adapted: the plan's style of a layer, applied to its base and to the factors of its adapters.

PEFT's LoRA layer computes `base_layer(x) + lora_B(lora_A(dropout(x)))`. Where the base's outputs are split, so are
those of B; where its inputs are split, so are those of A, whose partial products are then summed.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nxd_layers.hf.plans import join_path

_SPLIT_FACTOR = {"colwise": "lora_B", "rowwise": "lora_A"}
_WHOLE_FACTORS = ("lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B", "modules_to_save")


def styles_with_adapters(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles with those of adapted layers moved to their parts.

    Raises:
        ValueError: an adapter, or the style of its layer, cannot be split.
    """
    found: dict[str, str] = {}
    for path, style in styles.items():
        layer = _adapted(model, path)
        if layer is None:
            found[path] = style
            continue
        _check(path, layer, style)
        found[join_path(path, "base_layer")] = style
        factor = _SPLIT_FACTOR[style]
        found |= {f"{path}.{factor}.{adapter}": style for adapter in getattr(layer, factor)}
    return found


def check_adapters(model: nn.Module, *, sequence_parallel: bool) -> None:
    """Raise a ValueError if PEFT's adapters of a model cannot be split together with sequences."""
    if sequence_parallel and any(_is_adapted(layer) for layer in model.modules()):
        raise ValueError(
            "factors of adapters that are whole on each rank would see parts of sequences; leave sequence_parallel "
            "out, or the adapters"
        )


def check_heads_of_adapters(path: str, attention: nn.Module) -> None:
    """Raise a ValueError if an attention module whose heads are copied or padded has adapters."""
    if any(_is_adapted(layer) for layer in attention.modules()):
        raise ValueError(
            f"{path} has adapters, and numbers of heads that the tensor-parallel ranks do not divide; use fewer "
            "tensor-parallel ranks, such as the number of key-value heads"
        )


def _is_adapted(layer: nn.Module) -> bool:
    return hasattr(layer, "base_layer") or hasattr(layer, "original_module")


def _adapted(model: nn.Module, path: str) -> Any:
    """Return the layer at a path if PEFT has wrapped it; None for any other layer or a parameter."""
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return None
    return layer if _is_adapted(layer) else None


def _check(path: str, layer: Any, style: str) -> None:
    kept_whole = [name for name in _WHOLE_FACTORS if len(getattr(layer, name, ()))]
    if kept_whole or not hasattr(layer, "lora_A"):
        what = ", ".join(kept_whole) or type(layer).__name__
        raise ValueError(
            f"the adapter of {path} ({what}) cannot be split over tensor-parallel ranks; use LoRA without DoRA on "
            "linear layers, leave modules_to_save out, or use one tensor-parallel rank"
        )
    if style not in _SPLIT_FACTOR:
        raise ValueError(
            f"{path} has an adapter, but layers of the style {style!r} can be split without one only; leave it out of "
            "target_modules, or use one tensor-parallel rank"
        )
    if getattr(layer, "merged", False):
        raise ValueError(f"the adapter of {path} is merged into its weight; unmerge it before the model is split")
