"""Normalisation layers for use in a sequence-parallel region.

Each rank normalises its part of the sequence with the whole weight, so the weight's gradient is a partial sum; the
parameters say so by `sequence_parallel_enabled`, and the optimizer sums them before its step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _RMSNorm(Function):
    """Forward and backward with as few passes over the input as plain tensor operations allow.

    On a CPU that is more than twice as fast as autograd through the formula, which is what torch itself does there.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float() if hidden.itemsize < 4 else hidden
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
        products = (scaled * wide).reshape(-1, size)  # grad * normalised
        grad_weight = products.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        mean_product = products.mv(weight.to(products.dtype)).view(inverse_rms.shape) / size
        grad_hidden = scaled.mul_(weight).addcmul_(wide, mean_product * inverse_rms.square(), value=-1)
        return grad_hidden.to(hidden.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang and Sennrich 2019).

    Computed in float32 for shorter dtypes.

    Args:
        hidden_size: length of the last dim.
        eps: added to the mean square.
        sequence_parallel_enabled: inputs are parts of the sequence.
        dtype: of the weight.
        device: of the weight; torch's default device if None.

    Attributes:
        weight: `[hidden]`, whole on every rank.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to the same shape and dtype."""
        normalised: Tensor = _RMSNorm.apply(hidden, self.weight, self.eps)
        return normalised

    def extra_repr(self) -> str:
        """Size and eps."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose parameters are marked if they are in a sequence-parallel region.

    Args:
        normalized_shape: as in `nn.LayerNorm`.
        eps: as in `nn.LayerNorm`.
        elementwise_affine: whether there are weight and bias.
        sequence_parallel_enabled: inputs are parts of the sequence.
        dtype: of weight and bias.
        device: of weight and bias; torch's default device if None.
    """

    def __init__(
        self,
        normalized_shape: int | list[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]
