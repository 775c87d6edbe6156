"""Column-parallel layers that read the same tensor: query, key and value, or gate and up.

A model written for this package calls them by `column_parallel_linears`: it computes one product of all, so that they
communicate once per direction, and then calls each layer as a module, which finds its output there. In a model that
calls its layers one by one, they share a `SharedInput`: layers that are given the same tensor get the same node of the
graph, whose backward runs once, with the sum of their gradients.
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
    """A call of several layers with one input, which goes with it as an argument: a graph must not change a module.

    Attributes:
        input_: input of all layers.
        layers: query, key and value, for example.
        outputs: outputs of the layers, one for each.
        branches: by layer, what its adapter adds; computed for all of them when the first one asks.
    """

    input_: Tensor
    layers: Sequence[ColumnParallelLinear]
    outputs: Sequence[Tensor]
    branches: dict[nn.Module, Tensor] = field(default_factory=dict)

    def output(self, layer: ColumnParallelLinear, input_: Tensor) -> Tensor:
        """The output computed already, unless a forward pre-hook gave the layer another input."""
        if input_ is not self.input_:
            return column_outputs(input_, [layer])[0]
        return next(output for other, output in zip(self.layers, self.outputs, strict=True) if other is layer)


def column_parallel_linears(input_: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Call several column-parallel layers with one input, with one collective per direction instead of one per layer.

    Each layer is called as a module, with its hooks. A forward pre-hook that replaces the input costs that layer
    collectives of its own; one that changes the layer's parameters, such as `torch.nn.utils.weight_norm`, comes after
    the product. In a trace of torch.fx each layer is a call of its own.

    Args:
        input_: as for `ColumnParallelLinear.forward`.
        layers: query, key and value, or gate and up; alike in their sequence-parallel arguments. Adapters that
            `nxd_lora` gave them communicate together, too. Another module or forward works by itself.

    Returns:
        One output per layer.

    Raises:
        ValueError: the layers expect different inputs.
    """
    if not layers:
        raise ValueError("no layers given; expected at least one ColumnParallelLinear")
    if is_traced(input_):  # a graph has no place for a call that knows layers
        return tuple([layer(input_) for layer in layers])
    called_together = [layer for layer in layers if isinstance(layer, ColumnParallelLinear) and _has_own_forward(layer)]
    call = SharedCall(input_, called_together, column_outputs(input_, called_together) if called_together else ())
    return tuple([layer(input_, call=call) if layer in called_together else layer(input_) for layer in layers])


def _has_own_forward(layer: ColumnParallelLinear) -> bool:
    """Whether it takes the call, which a forward that somebody put in its place need not."""
    return type(layer).forward is ColumnParallelLinear.forward and "forward" not in layer.__dict__


class _Gathered(Function):
    """Replaces this rank's part by the whole tensor gathered before; partial gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.group, dim=ctx.dim), None, None, None


class SharedInput:
    """The latest input of some layers, until `forget`.

    Layers that are not given the same tensor are right as well, with a sum each. Not for layers that gather a
    sequence-parallel input themselves.
    """

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy starts again."""
        return SharedInput, ()

    def forget(self) -> None:
        """Release the input."""
        self._input: Tensor | None = None
        self._version = 0
        self._taken: Tensor | None = None

    def output(self, layer: ColumnParallelLinear, input_: Tensor) -> Tensor:
        """The output of `layer` for this input, whose gradient is summed with those of the other layers."""
        return column_outputs(self.take(input_), [layer], sums_input_grad=False)[0]

    def take(self, input_: Tensor) -> Tensor:
        """`input_` as split weights use it: the sum of its gradients over layers and ranks goes back."""
        if not torch.is_grad_enabled() or not input_.requires_grad:
            return input_
        if torch.compiler.is_compiling():
            return copy_to_tensor_model_parallel_region(in_autocast_dtype(input_))
        if self._taken is None or input_ is not self._input or input_._version != self._version:
            self._remember(input_, copy_to_tensor_model_parallel_region(in_autocast_dtype(input_)))
        assert self._taken is not None
        return self._taken

    def gathered(self, whole: Tensor, part: Tensor, dim: int) -> None:
        """Note that `whole` was gathered along `dim` from `part`, `[..., seq/tp, ...]`, which takes its gradients."""
        if torch.is_grad_enabled() and part.requires_grad and not torch.compiler.is_compiling():
            taken = _Gathered.apply(part, whole.detach(), active_group("tp"), dim)
            self._remember(whole, in_autocast_dtype(taken))

    def _remember(self, input_: Tensor, taken: Tensor) -> None:
        self._input, self._version, self._taken = input_, input_._version, taken
