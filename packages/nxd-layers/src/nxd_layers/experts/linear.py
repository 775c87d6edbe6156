"""The linear layers of all experts as one parameter."""

from collections.abc import Sequence
from typing import Literal

import torch
from nxd_state import (
    ShardSpec,
    active_group,
    set_partition_attributes,
    set_shard_spec,
    shard_along,
    splits_experts,
)
from torch import Tensor, nn

from nxd_layers.experts.parameters import (
    check_expert_tensor_parallel_size,
    mark_expert_parameter,
    spec_of_own_experts,
)
from nxd_layers.experts.products import grouped_product
from nxd_layers.initialization import InitMethod, default_linear_init, empty_parameter


class ExpertLinear(nn.Module):
    """A linear layer without bias for each expert of this rank; initial values are the same at every layout.

    Args:
        num_experts: of all ranks.
        input_size: of each expert.
        output_size: of each expert.
        split: what the tensor-parallel ranks of an expert have a part of.
        stride: number of matrices side by side in the outputs, each of which is split on its own.
        dtype: of the weight.
        device: of the weight.
        init_method: fills the weight of one expert, float32 `[in, out]`.

    Attributes:
        weight: `[experts/ep, in, out/etp]`, or `[experts/ep, in/etp, out]`.
        partition_dim: of the weight, along which ranks split it.
        stride: as given.

    Raises:
        ValueError: ranks do not divide experts or sizes, or are to split an expert that are some of the
            tensor-parallel ones only.
    """

    is_transposed = True  # as transformers says it of weights [experts, in, out]

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        split: Literal["inputs", "outputs"],
        stride: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod = default_linear_init,
    ) -> None:
        super().__init__()
        check_expert_tensor_parallel_size()
        self._shape = (num_experts, input_size, output_size)
        self._init_method = init_method
        group = active_group("etp")
        self.partition_dim = dim = 1 if split == "inputs" else 2
        self.stride = stride
        spec = shard_along(self._shape, dim, rank=group.rank, size=group.size, stride=stride)
        self._spec: ShardSpec = spec_of_own_experts(spec) if splits_experts() else spec
        self.weight = empty_parameter(self._spec.local_shape, dtype, device)
        if group.size > 1:
            set_partition_attributes(self.weight, partition_dim=dim, num_partitions=group.size, stride=stride)
        if splits_experts():
            mark_expert_parameter(self.weight)
        if splits_experts() or group.size > 1:
            set_shard_spec(self.weight, self._spec)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all experts anew, one after the other, and keep this rank's."""
        if self.weight.is_meta:
            return
        pieces = self._spec.pieces
        for expert in range(self._shape[0]):
            whole = torch.empty(self._shape[1:], dtype=torch.float32, device="cpu")
            self._init_method(whole)
            for piece in pieces:
                here = expert - piece.logical.offset[0]
                if 0 <= here < piece.logical.shape[0]:
                    part = whole[piece.logical.slices[1:]].to(self.weight.device, self.weight.dtype)
                    self.weight[piece.local.offset[0] + here][piece.local.slices[1:]] = part

    def forward(self, tokens: Tensor, counts: Sequence[int] | None) -> Tensor:
        """`[rows, in]`, the rows of this rank's experts one after the other, `counts` of each, to `[rows, out]`.

        Without counts each expert takes all rows: `[rows, in]` or `[experts, rows, in]` to `[experts, rows, out]`.
        """
        if counts is None:
            return tokens @ self.weight
        return grouped_product(tokens, self.weight, counts)
