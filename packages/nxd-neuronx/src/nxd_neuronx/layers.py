"""Pieces of parallel layers that scripts for NeuronX Distributed call or derive from, over the layers of nxd_layers."""

from abc import ABCMeta

import torch
from nxd_layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    token_log_probs,
)
from nxd_state import active_group, set_partition_attributes, set_shard_spec, shard_along
from torch import Tensor, nn
from torch.nn import functional as F


class BaseParallelLayer(nn.Module, metaclass=ABCMeta):
    """What every parallel layer is an instance of; a base for layers of your own."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()


class BaseParallelLinear(BaseParallelLayer):
    """What every parallel linear layer is an instance of."""


class BaseParallelConv(nn.Module, metaclass=ABCMeta):
    """What every parallel convolution is an instance of."""


BaseParallelLayer.register(ParallelEmbedding)
BaseParallelLinear.register(ColumnParallelLinear)
BaseParallelLinear.register(RowParallelLinear)
BaseParallelLinear.register(GQAQKVColumnParallelLinear)
BaseParallelConv.register(OutputChannelParallelConv2d)
BaseParallelConv.register(InputChannelParallelConv2d)


class Conv2dWithInputGradAllReduce:
    """`conv2d_with_weight_grad_allreduce` by `apply`, as of an autograd function."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        allreduce_weight_grad: bool,
    ) -> Tensor:
        """A convolution, with the input's gradient summed over the ranks if `allreduce_weight_grad`."""
        whole = copy_to_tensor_model_parallel_region(input) if allreduce_weight_grad else input
        return F.conv2d(whole, weight, bias, stride, padding)


conv2d_with_weight_grad_allreduce = Conv2dWithInputGradAllReduce.apply


class SPMDRank(nn.Module):
    """This rank's number as a parameter, which checkpoints hold as `arange(world_size)`. Layers here need none.

    Attributes:
        rank: `[1]` int32; the tensor-parallel rank, until a checkpoint says otherwise.
    """

    def __init__(self, world_size: int, tensor_model_parallel_size: int | None = None) -> None:
        super().__init__()
        group = active_group("tp")
        self.world_size = world_size
        self.tensor_model_parallel_size = tensor_model_parallel_size or group.size
        self.rank = nn.Parameter(torch.tensor([group.rank], dtype=torch.int32), requires_grad=False)
        self._set_split(self.rank)

    def get_rank(self) -> Tensor:
        """`[1]` int32."""
        return self.rank

    def initialize_expert_indices(self, num_local_experts: int) -> None:
        """Add the parameter of `get_local_expert_indices`, zeros until a checkpoint fills it."""
        indices = torch.zeros(1, num_local_experts, dtype=torch.int32)
        self.local_expert_indices = nn.Parameter(indices, requires_grad=False)
        self._set_split(self.local_expert_indices)

    def get_local_expert_indices(self) -> Tensor:
        """`[1, experts]` int32."""
        return self.local_expert_indices

    def _set_split(self, parameter: nn.Parameter) -> None:
        set_partition_attributes(parameter, partition_dim=0, num_partitions=self.world_size)
        group = active_group("tp")
        if group.size == self.world_size:
            whole = (self.world_size, *parameter.shape[1:])
            set_shard_spec(parameter, shard_along(whole, 0, rank=group.rank, size=group.size))


class DistributedLogprob:
    """The logarithm of each target's probability by `apply`, as of an autograd function."""

    @staticmethod
    def apply(vocab_parallel_logits: Tensor, target: Tensor, inference: bool = True) -> Tensor:
        """`[...]` float32 or float64 of logits `[..., vocab/tp]` and targets `[...]`; it can always be derived."""
        return token_log_probs(vocab_parallel_logits, target)


def from_parallel_logits_to_logprobs(vocab_parallel_logits: Tensor, target: Tensor, inference: bool = True) -> Tensor:
    """The logarithm of the probability that each token's logits give to the next token.

    Args:
        vocab_parallel_logits: `[batch, seq, vocab/tp]`.
        target: token ids `[batch, seq]`, not shifted.
        inference: accepted without effect; the result can always be derived.

    Returns:
        `[batch, seq - 1]`.
    """
    return DistributedLogprob.apply(vocab_parallel_logits[:, :-1], target[:, 1:], inference)
