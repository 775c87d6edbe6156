"""`neuronx_distributed.parallel_layers.utils`: division, attributes of parameters, splitting of tensors."""

from nxd_layers.padding import divide
from nxd_neuronx.process import get_local_world_size, initialize_fallback_parallel_state, is_pjrt_device
from nxd_neuronx.tensors import (
    EmbeddingUtility,
    get_padding_length,
    move_all_tensor_to_cpu,
    param_is_not_tensor_parallel_duplicate,
    requires_init_pg_override,
    set_tensor_model_parallel_attributes,
    split_tensor_along_dim,
    split_tensor_along_last_dim,
)
from nxd_state import move_model_to_device

__all__ = [
    "divide",
    "move_model_to_device",
    "set_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "EmbeddingUtility",
    "get_padding_length",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
    "move_all_tensor_to_cpu",
    "requires_init_pg_override",
    "get_local_world_size",
    "is_pjrt_device",
    "initialize_fallback_parallel_state",
]
