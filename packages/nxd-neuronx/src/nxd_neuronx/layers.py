"""The parallel layers of nxd_layers with the arguments of NeuronX Distributed, in its order, and pieces of them.

Arguments that serve the old library only are accepted and have no effect.
"""

from abc import ABCMeta

import nxd_layers
import torch
from nxd_layers import copy_to_tensor_model_parallel_region, token_log_probs
from nxd_state import active_group, set_partition_attributes, set_shard_spec, shard_along
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_neuronx.arguments import fifth_is_dtype, takes_order_too

COLUMN_ORDER = (
    "input_size output_size bias gather_output dtype device stride init_method sequence_parallel_enabled "
    "sequence_dimension keep_master_weight skip_bias_add pad pad_alignment_size_per_rank keep_padded_output "
    "tensor_model_parallel_group reduce_dtype rank_ordering"
)
ROW_ORDER = (
    "input_size output_size bias input_is_parallel dtype device stride init_method sequence_parallel_enabled "
    "sequence_dimension keep_master_weight skip_bias_add pad reduce_output tensor_model_parallel_group reduce_dtype "
    "tile_cc rank_ordering"
)
QKV_ORDER = (
    "input_size output_sizes bias gather_output dtype device init_method sequence_parallel_enabled "
    "keep_master_weight kv_size_multiplier fuse_qkv reduce_dtype"
)
EMBEDDING_ORDER = (
    "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse init_method device dtype "
    "shard_across_embedding pad sequence_parallel_enabled tensor_model_parallel_group use_spmd_rank "
    "sequence_dimension tile_cc rank_ordering collect_output"
)
_TILE_CC = {"tile_cc": "collectives are not tiled"}
_IGNORED_BY_EMBEDDINGS = {
    "sparse": "gradients of tables are dense tensors, with the same numbers",
    "use_spmd_rank": "the rank is data in every graph already",
    **_TILE_CC,
}


class ColumnParallelLinear(nxd_layers.ColumnParallelLinear):
    """`nxd_layers.ColumnParallelLinear`; `dtype` may also stand fifth, followed by the rest of `COLUMN_ORDER`."""

    __init__ = takes_order_too(nxd_layers.ColumnParallelLinear.__init__, COLUMN_ORDER, tells=fifth_is_dtype)


class RowParallelLinear(nxd_layers.RowParallelLinear):
    """`nxd_layers.RowParallelLinear`; `dtype` may also stand fifth, followed by the rest of `ROW_ORDER`.

    `device=False`, which one document gives, means None.
    """

    __init__ = takes_order_too(nxd_layers.RowParallelLinear.__init__, ROW_ORDER, tells=fifth_is_dtype, ignored=_TILE_CC)


class GQAQKVColumnParallelLinear(nxd_layers.GQAQKVColumnParallelLinear):
    """`nxd_layers.GQAQKVColumnParallelLinear`; `dtype` may also stand fifth, followed by the rest of `QKV_ORDER`."""

    __init__ = takes_order_too(nxd_layers.GQAQKVColumnParallelLinear.__init__, QKV_ORDER, tells=fifth_is_dtype)


class ParallelEmbedding(nxd_layers.ParallelEmbedding):
    """`nxd_layers.ParallelEmbedding`; `padding_idx` may also stand third, followed by the rest of `EMBEDDING_ORDER`."""

    __init__ = takes_order_too(
        nxd_layers.ParallelEmbedding.__init__,
        EMBEDDING_ORDER,
        tells=lambda args: len(args) > 2 and not callable(args[2]),
        ignored=_IGNORED_BY_EMBEDDINGS,
    )


class BaseParallelLayer(nn.Module, metaclass=ABCMeta):
    """Base class of every parallel layer, and of layers of your own."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()


class BaseParallelLinear(BaseParallelLayer):
    """Base class of every parallel linear layer."""


class BaseParallelConv(nn.Module, metaclass=ABCMeta):
    """Base class of every parallel convolution."""


BaseParallelLayer.register(nxd_layers.ParallelEmbedding)


BaseParallelLinear.register(nxd_layers.ColumnParallelLinear)


BaseParallelLinear.register(nxd_layers.RowParallelLinear)


BaseParallelLinear.register(nxd_layers.GQAQKVColumnParallelLinear)


BaseParallelConv.register(nxd_layers.OutputChannelParallelConv2d)


BaseParallelConv.register(nxd_layers.InputChannelParallelConv2d)


def conv2d_with_weight_grad_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    allreduce_weight_grad: bool,
) -> Tensor:
    """Return a convolution whose input gradient is summed over the ranks if `allreduce_weight_grad`."""
    whole = copy_to_tensor_model_parallel_region(input) if allreduce_weight_grad else input
    return F.conv2d(whole, weight, bias, stride, padding)


class SPMDRank(nn.Module):
    """The rank as a parameter, which checkpoints store as `arange(world_size)`; the layers here do not need it.

    Attributes:
        rank: `[1]` int32; the tensor-parallel rank until a checkpoint replaces it.
    """

    def __init__(self, world_size: int, tensor_model_parallel_size: int | None = None) -> None:
        super().__init__()
        group = active_group("tp")
        self.world_size = world_size
        self.tensor_model_parallel_size = tensor_model_parallel_size or group.size
        self.rank = nn.Parameter(torch.tensor([group.rank], dtype=torch.int32), requires_grad=False)
        self._set_split(self.rank)

    def get_rank(self) -> Tensor:
        """Return the rank, `[1]` int32."""
        return self.rank

    def initialize_expert_indices(self, num_local_experts: int) -> None:
        """Add the parameter that `get_local_expert_indices` returns; zeros until a checkpoint fills it."""
        indices = torch.zeros(1, num_local_experts, dtype=torch.int32)
        self.local_expert_indices = nn.Parameter(indices, requires_grad=False)
        self._set_split(self.local_expert_indices)

    def get_local_expert_indices(self) -> Tensor:
        """Return the indices, `[1, experts]` int32."""
        return self.local_expert_indices

    def _set_split(self, parameter: nn.Parameter) -> None:
        set_partition_attributes(parameter, partition_dim=0, num_partitions=self.world_size)
        group = active_group("tp")
        if group.size == self.world_size:
            whole = (self.world_size, *parameter.shape[1:])
            set_shard_spec(parameter, shard_along(whole, 0, rank=group.rank, size=group.size))


def from_parallel_logits_to_logprobs(vocab_parallel_logits: Tensor, target: Tensor, inference: bool = True) -> Tensor:
    """Return the log probability that each token's logits give to the next token.

    Args:
        vocab_parallel_logits: `[batch, seq, vocab/tp]`.
        target: token ids `[batch, seq]`, not shifted.
        inference: accepted without effect; the result is always differentiable.

    Returns:
        `[batch, seq - 1]`.
    """
    return token_log_probs(vocab_parallel_logits[:, :-1], target[:, 1:])
