"""Tensor- and sequence-parallel layers and losses for PyTorch."""

from nxd_layers.chunked_loss import linear_cross_entropy
from nxd_layers.cross_entropy import parallel_cross_entropy
from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel_linears
from nxd_layers.lora import LoraConfig, LoRAModel, LoraModel
from nxd_layers.norm import LayerNorm, RMSNorm
from nxd_layers.padding import divide, get_number_of_extra_heads, pad_model
from nxd_layers.regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.sharded_logits import parallel_argmax, parallel_topk

__version__ = "0.1.0"

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "column_parallel_linears",
    "ParallelEmbedding",
    "RMSNorm",
    "LayerNorm",
    "parallel_cross_entropy",
    "linear_cross_entropy",
    "parallel_argmax",
    "parallel_topk",
    "pad_model",
    "get_number_of_extra_heads",
    "divide",
    "LoraConfig",
    "LoraModel",
    "LoRAModel",
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
]
