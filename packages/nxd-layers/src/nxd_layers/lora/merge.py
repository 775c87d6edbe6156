"""Merging adapters into the weights that they adapt, and taking them out again.

The sum is computed in float32 (or float64) and rounded once to the weight's dtype. Rounding cannot be undone by
subtracting, so the layer's own weights wait in host memory while they are merged: unmerging restores every bit.
"""

import torch
from torch import Tensor, nn

from nxd_layers.lora.adapter import adapted_layers, require_adapter, widened


@torch.no_grad()
def merge_adapters(module: nn.Module) -> None:
    """Add each adapter's product to its layer's weights. Merged layers are left alone.

    Raises:
        ValueError: a weight to be merged is used by another layer as well, which would change with it.
    """
    layers = [layer for layer in adapted_layers(module).values() if not require_adapter(layer).is_merged]
    _check_not_tied(module, layers)
    for layer in layers:
        adapter = require_adapter(layer)
        unmerged = {}
        for name, delta in adapter.kind.weight_deltas(layer).items():
            weight = layer.get_parameter(name)
            unmerged[name] = weight.to("cpu", copy=True)
            weight.copy_(widened(weight) + delta)
        adapter.unmerged_weights = unmerged


@torch.no_grad()
def unmerge_adapters(module: nn.Module) -> None:
    """Restore the weights of all merged layers, bit for bit."""
    for layer in adapted_layers(module).values():
        adapter = require_adapter(layer)
        for name, weight in adapter.unmerged_weights.items():
            layer.get_parameter(name).copy_(weight)
        adapter.unmerged_weights = {}


def _check_not_tied(module: nn.Module, layers: list[nn.Module]) -> None:
    names_of: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    own = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
    tied = dict.fromkeys(" and ".join(names_of[weight]) for weight in own if len(names_of[weight]) > 1)
    if tied:
        raise ValueError(
            f"{'; '.join(tied)} are one tied weight: merging an adapter into it would change the other layer, too. "
            "Untie them first (give each its own copy), or keep the adapter unmerged"
        )
