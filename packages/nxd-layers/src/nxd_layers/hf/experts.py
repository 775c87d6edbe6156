"""Mixtures of experts in which every expert is split over the tensor-parallel ranks.

The experts of a layer are parameters `[experts, out, in]` of one module, which computes with whatever part of them it
has. Its inputs are whole on every rank, its output is this rank's part of a sum. The parameters have styles of their
own; this module handles the inputs and outputs.
"""

from typing import Any, Protocol

from nxd_state import active_group
from torch import Tensor, nn

from nxd_layers.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region


class _HasModule(Protocol):
    @property
    def module(self) -> nn.Module: ...


def apply(target: _HasModule) -> None:
    """Sum the gradients of hidden states and of the router's weights, and the output of the experts."""
    target.module.register_forward_pre_hook(_copied, with_kwargs=True)
    target.module.register_forward_hook(_summed)


def apply_identity(target: _HasModule) -> None:
    """An expert that returns its input does so once, and not once per rank."""
    target.module.register_forward_pre_hook(_divided)


def _copied(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tuple(map(_copy, args)), {name: _copy(value) for name, value in kwargs.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return copy_to_tensor_model_parallel_region(value)
    return value


def _summed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(output)


def _divided(module: nn.Module, args: Any) -> tuple[Any, ...]:
    return (args[0] / active_group("tp").size, *args[1:])
