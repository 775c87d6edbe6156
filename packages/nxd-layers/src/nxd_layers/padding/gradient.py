"""Keeping padding zero: its gradient is set to zero where a layer reads its weight.

Zero weights may still have a nonzero gradient: an activation that is not zero at zero, or a loss that reads padded
outputs, would change the padding, and with it the output of the model. The mask is part of the layer's forward
and not a hook on the parameter, because hooks are lost where a parameter is replaced (on its way from the meta
device, in a copy), and are not seen by `torch.compile`.

The padded elements differ between ranks. On XLA, where all ranks must record the same graph, they are therefore given
as data, and ranks without padding take part.
"""

import functools
from typing import Any

import torch
from nxd_state import ShardSpec, is_padded_on_some_rank, records_graphs
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


class _MaskedGradient(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, kept: Tensor) -> Tensor:
        ctx.kept = kept
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.kept, grad, torch.zeros_like(grad)), None


def zero_padding_gradient(parameter: Tensor, spec: ShardSpec) -> Tensor:
    """The parameter itself forward; backward only elements in a piece of `spec` get a gradient.

    Call it on every rank if there may be padding on one.
    """
    if records_graphs(parameter) and is_padded_on_some_rank(parameter):
        partition_dim: int = parameter.partition_dim  # type: ignore[attr-defined]
        return _MaskedGradient.apply(parameter, _kept(spec, partition_dim, parameter.device))
    if not spec.has_padding:
        return parameter
    return _ZeroPaddingGradient.apply(parameter, tuple(piece.local.slices for piece in spec.pieces))


@functools.cache
@torch.inference_mode(False)
def _kept(spec: ShardSpec, dim: int, device: torch.device) -> Tensor:
    """Which indices along `dim`, the only one that is padded, are in a piece: bool, 1 long in all other dims."""
    shape = [1] * len(spec.local_shape)
    shape[dim] = spec.local_shape[dim]
    kept = torch.zeros(shape, dtype=torch.bool)
    for piece in spec.pieces:
        kept.movedim(dim, 0)[piece.local.slices[dim]] = True
    return kept.to(device)
