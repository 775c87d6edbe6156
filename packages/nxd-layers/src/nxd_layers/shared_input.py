"""Column-parallel layers that read the same tensor (query, key and value, or gate and up) communicate once for all.

There are two ways:

- `column_parallel_linears`, for models written for this package: it multiplies by the weights of all layers at once,
  and then calls each layer as a module, which takes its output from the `SharedCall`.
- `SharedInput`, for models that call their layers one by one: layers that are given the same tensor get one node of
  the autograd graph, whose backward runs once, with the sum of their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from nxd_state import Group, active_group, reduce_scatter
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.column_linear import in_autocast_dtype
from nxd_layers.linear import ColumnParallelLinear, column_outputs
from nxd_layers.mappings import copy_to_tensor_model_parallel_region
from nxd_layers.tracing import is_traced


@dataclass(eq=False)
class SharedCall:
    """One call of several layers with the same input. Each layer gets it as an argument, so that a compiled graph need
    not change modules.

    Attributes:
        input_: the input of all layers.
        layers: the layers, such as query, key and value.
        outputs: the output of each layer.
        branches: what the adapter of each layer adds; computed for all layers when the first one needs it.
    """

    input_: Tensor
    layers: Sequence[ColumnParallelLinear]
    outputs: Sequence[Tensor]
    branches: dict[nn.Module, Tensor] = field(default_factory=dict)

    def output(self, layer: ColumnParallelLinear, input_: Tensor) -> Tensor:
        """The layer's output, computed already unless a forward pre-hook gave the layer another input."""
        if input_ is not self.input_:
            return column_outputs(input_, [layer])[0]
        return next(output for other, output in zip(self.layers, self.outputs, strict=True) if other is layer)


def column_parallel_linears(input_: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Call several column-parallel layers with one input, with one collective per direction instead of one per layer.

    Each layer is called as a module, with its hooks. A layer whose forward pre-hook replaces the input communicates by
    itself. A pre-hook that changes parameters, such as that of `torch.nn.utils.weight_norm`, runs too late: the output
    is computed by then. In a trace of torch.fx each layer is called by itself.

    Args:
        input_: as for `ColumnParallelLinear.forward`.
        layers: the layers, with the same sequence-parallel arguments. Their adapters from `nxd_lora` communicate
            together, too. Other modules, and layers whose forward was replaced, are called by themselves.

    Returns:
        One output per layer.

    Raises:
        ValueError: the layers expect different inputs.
    """
    if not layers:
        raise ValueError("no layers given; expected at least one ColumnParallelLinear")
    if is_traced(input_):  # a graph of torch.fx cannot hold a `SharedCall`
        return tuple([layer(input_) for layer in layers])
    called_together = [layer for layer in layers if isinstance(layer, ColumnParallelLinear) and _has_own_forward(layer)]
    call = SharedCall(input_, called_together, column_outputs(input_, called_together) if called_together else ())
    return tuple([layer(input_, call=call) if layer in called_together else layer(input_) for layer in layers])


def _has_own_forward(layer: ColumnParallelLinear) -> bool:
    """Whether the layer has its original forward; a replacement may not accept `call`."""
    return type(layer).forward is ColumnParallelLinear.forward and "forward" not in layer.__dict__


class _Gathered(Function):
    """Returns the whole tensor that was gathered from this rank's part; backward reduce-scatters its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.group, dim=ctx.dim), None, None, None


class SharedInput:
    """The latest input of layers that usually read the same tensor.

    Layers given different tensors are still correct; each sums its own input gradient. It is not for layers that gather
    a sequence-parallel input themselves.
    """

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy it without the input."""
        return SharedInput, ()

    def forget(self) -> None:
        """Release the input, after the forward of the layers' parent."""
        self._input: Tensor | None = None
        self._version = 0  # of the input, which may be changed in place between two layers
        self._shared: Tensor | None = None  # the input as the layers use it: the output of the common node

    def output(self, layer: ColumnParallelLinear, input_: Tensor) -> Tensor:
        """The output of `layer` for this input, whose gradient is summed with those of the other layers."""
        return column_outputs(self.take(input_), [layer], sums_input_grad=False)[0]

    def take(self, input_: Tensor) -> Tensor:
        """The input as the layers use it; its gradient is summed over layers and ranks."""
        if not torch.is_grad_enabled() or not input_.requires_grad:
            return input_
        if torch.compiler.is_compiling():
            return copy_to_tensor_model_parallel_region(in_autocast_dtype(input_))
        if self._shared is not None and input_ is self._input and input_._version == self._version:
            return self._shared
        return self._remember(input_, copy_to_tensor_model_parallel_region(in_autocast_dtype(input_)))

    def gathered(self, whole: Tensor, part: Tensor, dim: int) -> None:
        """Have gradients of the input `whole` go to `part`, `[..., seq/tp, ...]`, from which it was gathered."""
        if torch.is_grad_enabled() and part.requires_grad and not torch.compiler.is_compiling():
            gathered = _Gathered.apply(part, whole.detach(), active_group("tp"), dim)
            self._remember(whole, in_autocast_dtype(gathered))

    def _remember(self, input_: Tensor, shared: Tensor) -> Tensor:
        self._input, self._version, self._shared = input_, input_._version, shared
        return shared
