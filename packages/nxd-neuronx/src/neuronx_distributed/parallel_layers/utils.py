"""`neuronx_distributed.parallel_layers.utils`: division, attributes of parameters, cutting and casting of tensors."""

from nxd_layers.padding import divide
from nxd_neuronx.process import (
    get_local_world_size,
    initialize_fallback_parallel_state,
    is_pjrt_device,
)
from nxd_neuronx.tensors import (
    EmbeddingUtility,
    cast_if_autocast_enabled,
    get_padding_length,
    indices_split_along_dim,
    is_torch_version_greater_than_2,
    move_all_tensor_to_cpu,
    param_is_not_tensor_parallel_duplicate,
    requires_init_pg_override,
    set_tensor_model_parallel_attributes,
    split_tensor_along_dim,
    split_tensor_along_last_dim,
    verify_casted_dtype,
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
    "indices_split_along_dim",
    "cast_if_autocast_enabled",
    "verify_casted_dtype",
    "move_all_tensor_to_cpu",
    "is_torch_version_greater_than_2",
    "requires_init_pg_override",
    "get_local_world_size",
    "is_pjrt_device",
    "initialize_fallback_parallel_state",
]
