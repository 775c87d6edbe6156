"""Normalisation layers for use in a sequence-parallel region.

Each rank normalizes its part of the sequence with the whole weight, so the weight's gradient is a partial sum; the
parameters say so by `sequence_parallel_enabled`, and the optimizer sums them before its step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from nxd_state import at_least_float32
from nxd_state.parameter_marks import mark_sequence_parallel
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.tracing import mixes_up_saved_tensors


class _RMSNorm(Function):
    """Forward and backward with as few passes over the input as plain tensor operations allow.

    On a CPU that is more than twice as fast as autograd through the formula, which is what torch itself does there.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(hidden)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / wide.shape[-1]
        inverse_rms = torch.rsqrt(mean_square + eps)
        ctx.save_for_backward(hidden, weight, inverse_rms)
        return (wide * inverse_rms).mul_(weight).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, inverse_rms = ctx.saved_tensors
        size = hidden.shape[-1]
        wide = hidden.to(inverse_rms.dtype)
        scaled = grad * inverse_rms
        products = (scaled * wide).reshape(-1, size)  # grad * normalized
        grad_weight = products.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        mean_product = products.mv(weight.to(products.dtype)).view(inverse_rms.shape) / size
        grad_hidden = scaled.mul_(weight).addcmul_(wide, mean_product * inverse_rms.square(), value=-1)
        return grad_hidden.to(hidden.dtype), grad_weight, None


def _normalised(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    if mixes_up_saved_tensors():
        wide = at_least_float32(hidden)
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * inverse_rms * weight).to(hidden.dtype)
    normalised: Tensor = _RMSNorm.apply(hidden, weight, eps)
    return normalised


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dims (Zhang and Sennrich 2019).

    Computed in float32 for shorter dtypes.

    Args:
        normalized_shape: length of the last dim, or lengths of the last dims.
        eps: added to the mean square.
        sequence_parallel_enabled: inputs are parts of the sequence.
        dtype: dtype of the weight.
        device: device of the weight; torch's default device if None.
        elementwise_affine: accepted without effect; must be True.

    Attributes:
        weight: `normalized_shape`, whole on every rank.

    Raises:
        ValueError: `elementwise_affine` is False.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        sequence_parallel_enabled: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if not elementwise_affine:
            raise ValueError("elementwise_affine=False: this RMSNorm has a weight; use torch.nn.RMSNorm without one")
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape = torch.Size(shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
        mark_sequence_parallel(self.weight, sequence_parallel_enabled)

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., *normalized_shape]` to the same shape and dtype."""
        dims = len(self.normalized_shape)
        if dims == 1:
            return _normalised(hidden, self.weight, self.eps)
        return _normalised(hidden.flatten(-dims), self.weight.flatten(), self.eps).view(hidden.shape)

    def extra_repr(self) -> str:
        """Size and eps."""
        return f"{tuple(self.normalized_shape)}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose parameters are marked if they are in a sequence-parallel region.

    Args:
        normalized_shape: as in `nn.LayerNorm`.
        eps: as in `nn.LayerNorm`.
        elementwise_affine: whether there are weight and bias.
        bias: whether there is a bias.
        device: device of weight and bias; torch's default device if None.
        dtype: dtype of weight and bias; torch's default dtype if None.
        sequence_parallel_enabled: inputs are parts of the sequence.
    """

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        for parameter in self.parameters():
            mark_sequence_parallel(parameter, sequence_parallel_enabled)
