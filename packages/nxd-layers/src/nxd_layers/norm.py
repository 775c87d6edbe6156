"""Normalisation layers that can stand in a sequence-parallel region.

Each rank normalises its part of the sequence with the whole weight, so the weight's gradient is a partial sum; the
parameters say so by `sequence_parallel_enabled`, and the optimizer sums them before its step.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        wide = hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)

    def extra_repr(self) -> str:
        """Size and eps."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose parameters know whether they stand in a sequence-parallel region.

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

    def forward(self, input: Tensor) -> Tensor:
        """`[..., *normalized_shape]` to the same shape and dtype."""
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
