"""One sum of the input's gradient for column-parallel layers that are called one by one.

A model that calls query, key and value, or gate and up, itself does not go through `column_parallel_linears`. Layers
with the same `SharedInput` take their input through it: where they are given the same tensor, they get the same node
of the graph, whose backward runs once, with the sum of their gradients.
"""

from typing import Any

import torch
from nxd_state import Group, active_group, reduce_scatter
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.column_linear import in_autocast_dtype
from nxd_layers.mappings import copy_to_tensor_model_parallel_region


class _Gathered(Function):
    """From this rank's part to a whole tensor that is there already; partial gradients are reduce-scattered."""

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

    Layers that are not given the same tensor are right as well, with a sum each.
    """

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins anew."""
        return SharedInput, ()

    def forget(self) -> None:
        """Keep no tensor alive."""
        self._input: Tensor | None = None
        self._version = 0
        self._taken: Tensor | None = None

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
        """Say that `whole` was gathered along `dim` from `part`, `[..., seq/tp, ...]`: its gradients can go there."""
        if torch.is_grad_enabled() and part.requires_grad and not torch.compiler.is_compiling():
            taken = _Gathered.apply(part, whole.detach(), active_group("tp"), dim)
            self._remember(whole, in_autocast_dtype(taken))

    def _remember(self, input_: Tensor, taken: Tensor) -> None:
        self._input, self._version, self._taken = input_, input_._version, taken
