"""`neuronx_distributed.parallel_layers.layers`: the layers of nxd_layers, and pieces of them."""

from nxd_layers import InputChannelParallelConv2d, LayerNorm, OutputChannelParallelConv2d, RMSNorm
from nxd_layers.conv import INPUT_CHANNEL_DIM as CONV_KERNEL_INPUT_CHANNEL_DIMENSION
from nxd_layers.conv import OUTPUT_CHANNEL_DIM as CONV_KERNEL_OUTPUT_CHANNEL_DIMENSION
from nxd_neuronx.layers import (
    BaseParallelConv,
    BaseParallelLayer,
    BaseParallelLinear,
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    SPMDRank,
    conv2d_with_weight_grad_allreduce,
)
from nxd_neuronx.tensors import create_local_weight, param_is_not_tensor_parallel_duplicate

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ParallelEmbedding",
    "OutputChannelParallelConv2d",
    "InputChannelParallelConv2d",
    "LayerNorm",
    "RMSNorm",
    "BaseParallelLayer",
    "BaseParallelLinear",
    "BaseParallelConv",
    "conv2d_with_weight_grad_allreduce",
    "SPMDRank",
    "create_local_weight",
    "param_is_not_tensor_parallel_duplicate",
    "CONV_KERNEL_INPUT_CHANNEL_DIMENSION",
    "CONV_KERNEL_OUTPUT_CHANNEL_DIMENSION",
]
