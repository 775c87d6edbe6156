"""Tensor- and sequence-parallel layers, attention and losses for PyTorch."""

from nxd_layers.activation_checkpoint import (
    apply_activation_checkpointing,
    matmul_outputs,
    remove_activation_checkpointing,
)
from nxd_layers.attention import CoreAttention, attention_mask, document_ids_from_lengths
from nxd_layers.chunked_loss import linear_cross_entropy
from nxd_layers.conv import InputChannelParallelConv2d, OutputChannelParallelConv2d
from nxd_layers.cross_entropy import entropy, parallel_cross_entropy, token_log_probs
from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.head_padding import pad_model
from nxd_layers.key_value_heads import kv_size_multiplier_for
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.log_prob_report import LogProbReport, compare_log_probs
from nxd_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.norm import LayerNorm, RMSNorm
from nxd_layers.padding import divide, get_number_of_extra_heads
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_layers.sharded_logits import parallel_argmax, parallel_topk
from nxd_layers.shared_input import column_parallel_linears

__version__ = "0.1.0"

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "column_parallel_linears",
    "GQAQKVColumnParallelLinear",
    "kv_size_multiplier_for",
    "ParallelEmbedding",
    "OutputChannelParallelConv2d",
    "InputChannelParallelConv2d",
    "CoreAttention",
    "attention_mask",
    "document_ids_from_lengths",
    "RMSNorm",
    "LayerNorm",
    "parallel_cross_entropy",
    "linear_cross_entropy",
    "token_log_probs",
    "entropy",
    "compare_log_probs",
    "LogProbReport",
    "parallel_argmax",
    "parallel_topk",
    "pad_model",
    "get_number_of_extra_heads",
    "divide",
    "apply_activation_checkpointing",
    "remove_activation_checkpointing",
    "matmul_outputs",
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
]
