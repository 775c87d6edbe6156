"""Keeping padding zero: its gradient is set to zero where a layer reads its weight.

That padded weights are zero does not make their gradient zero: an activation that is not zero at zero, or a loss that
reads padded outputs, would move them, and with them the output of the model. The mask is part of the layer's forward
and not a hook on the parameter, because hooks are lost where a parameter is replaced (on its way from the meta
device, in a copy), and are not seen by `torch.compile`.
"""

from typing import Any

import torch
from nxd_state import ShardSpec
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _ZeroPaddingGradient(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, kept: tuple[tuple[slice, ...], ...]) -> Tensor:
        ctx.kept = kept
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        masked = torch.zeros_like(grad)  # not a product with zeros: that would keep a NaN
        for box in ctx.kept:
            masked[box] = grad[box]
        return masked, None


def zero_padding_gradient(parameter: Tensor, spec: ShardSpec) -> Tensor:
    """The parameter itself forward; backward only elements in a piece of `spec` get a gradient."""
    if not spec.has_padding:
        return parameter
    return _ZeroPaddingGradient.apply(parameter, tuple(piece.local.slices for piece in spec.pieces))
