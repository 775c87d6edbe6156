"""`neuronx_distributed.parallel_layers.utils`: division, attributes of parameters, cutting of tensors."""

from nxd_layers.padding import divide
from nxd_state import move_model_to_device
from nxd_trainer.script_helpers import (
    copy_tensor_model_parallel_attributes,
    get_local_world_size,
    is_pjrt_device,
    move_all_tensor_to_cpu,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
    split_tensor_along_dim,
    split_tensor_along_last_dim,
)

__all__ = [
    "divide",
    "move_model_to_device",
    "set_tensor_model_parallel_attributes",
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
    "move_all_tensor_to_cpu",
    "get_local_world_size",
    "is_pjrt_device",
]
