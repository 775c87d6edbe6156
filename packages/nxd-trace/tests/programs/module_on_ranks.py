"""A model built once, as rank 0 of a planned world, and traced for all ranks."""

import torch
from nxd_state import (
    active_group,
    all_reduce,
    get_tensor_model_parallel_group,
    set_partition_attributes,
    set_shard_spec,
    shard_along,
)
from torch import Tensor, nn

INPUTS, OUTPUTS = 4, 3


class Accumulating(nn.Module):
    """`x W^T + b`, with `W` split along its inputs, and the sum of all outputs so far."""

    def __init__(self) -> None:
        super().__init__()
        group = active_group("tp")
        spec = shard_along((OUTPUTS, INPUTS), 1, rank=group.rank, size=group.size)
        self.weight = nn.Parameter(torch.zeros(spec.local_shape, dtype=torch.float64))
        if group.size > 1:
            set_shard_spec(self.weight, spec)
            set_partition_attributes(self.weight, partition_dim=1, num_partitions=group.size)
        self.bias = nn.Parameter(torch.zeros(OUTPUTS, dtype=torch.float64))
        self.register_buffer("total", torch.zeros(OUTPUTS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        group = active_group("tp")
        own = x.unflatten(-1, (group.size, -1)).index_select(-2, group.rank_tensor(x).view(1)).squeeze(-2)
        output = all_reduce(own @ self.weight.t(), group) + self.bias
        self.total.add_(output.sum(0))
        return output + self.total


class Assigning(Accumulating):
    """Assigns a new tensor to its buffer, as models for torch-xla do, and reads its group's size."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.group = get_tensor_model_parallel_group()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.total = (self.total * self.group.size()).to(self.dtype)
        return output
