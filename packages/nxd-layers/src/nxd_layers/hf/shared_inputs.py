"""Finds the layers of a split model that read the same tensor: query, key and value, or gate and up."""

from typing import Any, TypeAlias

from torch import nn

from nxd_layers.hf.head_layout import CopiedHeadsLinear
from nxd_layers.linear import ColumnParallelLinear
from nxd_layers.shared_input import SharedInput

_Column: TypeAlias = ColumnParallelLinear | CopiedHeadsLinear


def share_inputs(module: nn.Module, *, least: int = 2) -> None:
    """Have column-parallel layers with one parent and inputs of one size sum the gradient of what they share once.

    Args:
        module: parallelized; its layers and those of modules in it are meant, unless they share their input already.
        least: number of layers for which it is done. A single one gains nothing, outside of sequence parallelism.
    """
    for parent in list(module.modules()):
        by_size: dict[int, list[_Column]] = {}
        for child in parent.children():
            if isinstance(child, _Column) and child.shared_input is None and not _gathers_its_input(child):
                by_size.setdefault(child.weight.shape[1], []).append(child)
        for layers in by_size.values():
            if len(layers) >= least:
                _share(parent, layers)


def shared_inputs_of(block: nn.Module) -> list[SharedInput]:
    """Of the layers in a block."""
    found = (getattr(module, "shared_input", None) for module in block.modules())
    return list(dict.fromkeys(it for it in found if it is not None))


def _gathers_its_input(layer: _Column) -> bool:
    return isinstance(layer, ColumnParallelLinear) and layer.sequence_parallel_enabled


def _share(parent: nn.Module, layers: list[_Column]) -> None:
    shared = SharedInput()
    for layer in layers:
        layer.shared_input = shared
    parent.register_forward_hook(_Forget(shared), always_call=True)


class _Forget:
    """A forward hook."""

    def __init__(self, shared: SharedInput) -> None:
        self._shared = shared

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._shared.forget()
