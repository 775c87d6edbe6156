"""Pieces of parallel layers that scripts for NeuronX Distributed call or derive from, over the layers of nxd_layers."""

from abc import ABCMeta
from typing import Any

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
from nxd_layers.column_linear import column_linear
from nxd_layers.mappings import GivenGroup, process_group_as
from nxd_state import active_group, set_partition_attributes, set_shard_spec, shard_along
from torch import Tensor, nn
from torch.nn import functional as F


class BaseParallelLayer(nn.Module, metaclass=ABCMeta):
    """What every parallel layer is an instance of; a base for layers of one's own."""

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


class LinearWithAsyncCommunication:
    """`linear_with_async_allreduce` by `apply`, as of an autograd function."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None = 0,
        save_for_backward: bool = True,
        process_group: GivenGroup = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> Tensor:
        """The product; see `linear_with_async_allreduce`."""
        communicates = async_grad_allreduce or sequence_parallel_enabled
        (output,) = column_linear(
            input,
            [weight],
            [bias],
            process_group_as(process_group) if communicates else None,
            sequence_dim=(sequence_dimension or 0) if sequence_parallel_enabled else None,
            reduce_dtype=reduce_dtype,
        )
        return output


def linear_with_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    sequence_dimension: int | None = 0,
    autograd_func_class: Any = LinearWithAsyncCommunication,
    save_for_backward: bool = True,
    process_group: GivenGroup = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """`input @ weight.T + bias`, with the input's gradient summed over the ranks while the weight's is computed.

    Args:
        input: `[..., in]`, or this rank's part of the sequence.
        weight: `[out/tp, in]`.
        bias: `[out/tp]` or None.
        async_grad_allreduce: sum the input's gradient; False leaves it partial.
        sequence_parallel_enabled: gather the input, and reduce-scatter its gradient.
        sequence_dimension: the dim along which the input is split then; 0 if None.
        autograd_func_class: computes the product by its `apply`.
        save_for_backward: taken for scripts that give it; autograd knows what backward needs.
        process_group: the ranks; the tensor-parallel ones if None.
        reduce_dtype: in which gradients are summed; in their own if None.
    """
    output: Tensor = autograd_func_class.apply(
        input,
        weight,
        bias,
        async_grad_allreduce,
        sequence_parallel_enabled,
        sequence_dimension,
        save_for_backward,
        process_group,
        reduce_dtype,
    )
    return output


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


class GQAQKVLinearWithAsyncCommunication:
    """`gqa_qkv_linear_with_async_allreduce` by `apply`, as of an autograd function."""

    @staticmethod
    def apply(
        input: Tensor,
        weight_q: Tensor | None,
        weight_k: Tensor | None,
        weight_v: Tensor | None,
        bias_q: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        kv_size_multiplier: int = 1,
        weight_qkv: Tensor | None = None,
        bias_qkv: Tensor | None = None,
        fuse_qkv: bool = False,
        output_size_q: int | None = None,
        output_size_kv: int | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one input, with its gradient summed once over the ranks.

        Args:
            input: `[..., in]`, or with `sequence_parallel_enabled` `[seq/tp, ..., in]`.
            weight_q: `[q/tp, in]`; with `fuse_qkv` None, as the other two.
            weight_k: `[kv/tp, in]`.
            weight_v: `[kv/tp, in]`.
            bias_q: `[q/tp]` or None.
            bias_k: `[kv/tp]` or None.
            bias_v: `[kv/tp]` or None.
            async_grad_allreduce: sum the input's gradient.
            sequence_parallel_enabled: gather the input along dim 0.
            kv_size_multiplier: must be 1: copies of heads are summed by the layer `GQAQKVColumnParallelLinear`.
            weight_qkv: `[(q + 2 * kv)/tp, in]` with `fuse_qkv`.
            bias_qkv: of it, or None.
            fuse_qkv: compute one product.
            output_size_q: of this rank, with `fuse_qkv`.
            output_size_kv: of this rank, with `fuse_qkv`.
            reduce_dtype: in which gradients are summed; in their own if None.

        Raises:
            ValueError: a `kv_size_multiplier` above 1, or sizes or weights are missing.
        """
        if kv_size_multiplier != 1:
            raise ValueError(
                f"kv_size_multiplier={kv_size_multiplier}: this function does not know how copies of heads lie; use "
                "GQAQKVColumnParallelLinear(kv_size_multiplier=...)"
            )
        weights = [weight_qkv] if fuse_qkv else [weight_q, weight_k, weight_v]
        given = [weight for weight in weights if weight is not None]
        if len(given) < len(weights) or (fuse_qkv and (output_size_q is None or output_size_kv is None)):
            raise ValueError("give weight_qkv, output_size_q and output_size_kv with fuse_qkv=True, else three weights")
        outputs = column_linear(
            input,
            given,
            [bias_qkv] if fuse_qkv else [bias_q, bias_k, bias_v],
            active_group("tp") if async_grad_allreduce or sequence_parallel_enabled else None,
            sequence_dim=0 if sequence_parallel_enabled else None,
            reduce_dtype=reduce_dtype,
        )
        if fuse_qkv:
            outputs = outputs[0].split([output_size_q, output_size_kv, output_size_kv], dim=-1)
        query, key, value = outputs
        return query, key, value


gqa_qkv_linear_with_async_allreduce = GQAQKVLinearWithAsyncCommunication.apply


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
        inference: taken for scripts that give it; the result can always be derived.

    Returns:
        `[batch, seq - 1]`.
    """
    return DistributedLogprob.apply(vocab_parallel_logits[:, :-1], target[:, 1:], inference)


def manual_rms_norm(input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dims, computed in float32 for shorter dtypes; in the input's dtype."""
    wide = input.float() if input.itemsize < 4 else input
    normed = F.rms_norm(wide, tuple(normalized_shape), None if weight is None else weight.to(wide.dtype), eps)
    return normed.to(input.dtype)


def check_requires_grad(weight_qkv: Tensor | None, fuse_qkv: bool, weight_q: Tensor | None) -> bool:
    """Whether the weights of queries, keys and values learn."""
    weight = weight_qkv if fuse_qkv else weight_q
    return weight is not None and weight.requires_grad


def check_use_bias(
    weight_qkv: Tensor | None,
    fuse_qkv: bool,
    weight_q: Tensor | None,
    bias_q: Tensor | None,
    bias_qkv: Tensor | None,
) -> bool:
    """Whether there are biases of queries, keys and values, and they learn."""
    bias = bias_qkv if fuse_qkv else bias_q
    return bias is not None and check_requires_grad(weight_qkv, fuse_qkv, weight_q)
