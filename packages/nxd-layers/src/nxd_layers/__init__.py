"""Tensor- and sequence-parallel layers and losses for PyTorch."""

from nxd_layers.cross_entropy import parallel_cross_entropy
from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel_linears
from nxd_layers.norm import LayerNorm, RMSNorm
from nxd_layers.regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

__version__ = "0.1.0"

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "column_parallel_linears",
    "ParallelEmbedding",
    "RMSNorm",
    "LayerNorm",
    "parallel_cross_entropy",
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
]
