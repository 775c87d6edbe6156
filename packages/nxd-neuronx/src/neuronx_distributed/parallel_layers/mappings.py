"""`neuronx_distributed.parallel_layers.mappings`: the autograd mappings of nxd_layers."""

from nxd_layers import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from nxd_neuronx.mappings import gather_along_first_dim as _gather_along_first_dim
from nxd_neuronx.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region_with_dim,
    reduce_scatter_to_tensor_model_parallel_region_with_dim,
    scatter_to_process_group_spmd,
    scatter_to_tensor_model_parallel_region,
)
from nxd_neuronx.mappings import gather_from_tensor_model_parallel_region_with_dim as _gather_along_dim
from nxd_neuronx.mappings import reduce_scatter_along_dim as _reduce_scatter_along_dim
from nxd_neuronx.mappings import split_along_first_dim as _split_along_first_dim
from nxd_neuronx.tensors import split_tensor_along_last_dim

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim",
    "gather_from_tensor_model_parallel_region_with_dim",
    "scatter_to_process_group_spmd",
    "split_tensor_along_last_dim",
    "_split_along_first_dim",
    "_gather_along_first_dim",
    "_gather_along_dim",
    "_reduce_scatter_along_dim",
]
