"""`neuronx_distributed.parallel_layers.mappings`: the autograd regions of nxd_layers."""

from nxd_layers import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_neuronx.expert_regions import enter_expert_parallel_region, exit_expert_parallel_region
from nxd_neuronx.mappings import gather_along_first_dim as _gather_along_first_dim
from nxd_neuronx.mappings import gather_along_last_dim as _gather_along_last_dim
from nxd_neuronx.mappings import (
    gather_from_tensor_model_parallel_region_with_dim,
    nonzero_partition_dim_swap,
    reduce_from_context_model_parallel_region,
    reduce_scatter_to_tensor_model_parallel_region_with_dim,
    round_robin_scatter_to_process_group_spmd,
    scatter_input_channels_to_tensor_model_parallel_region,
    scatter_to_process_group_spmd,
)
from nxd_neuronx.mappings import split_along_first_dim as _split_along_first_dim
from nxd_neuronx.mappings import split_along_last_dim as _split_along_last_dim

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "nonzero_partition_dim_swap",
    "reduce_from_context_model_parallel_region",
    "scatter_input_channels_to_tensor_model_parallel_region",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim",
    "gather_from_tensor_model_parallel_region_with_dim",
    "scatter_to_process_group_spmd",
    "round_robin_scatter_to_process_group_spmd",
    "enter_expert_parallel_region",
    "exit_expert_parallel_region",
    "_split_along_first_dim",
    "_split_along_last_dim",
    "_gather_along_first_dim",
    "_gather_along_last_dim",
]
