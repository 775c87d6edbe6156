"""Small functions that training scripts for NeuronX Distributed import beside the documented API.

They are served under the import paths that those scripts use, see `neuronx_distributed`. New code finds the same, and
more, in nxd_state, nxd_layers and nxd_optim.
"""

from nxd_trainer.script_helpers.adamw_fp32 import AdamW_FP32OptimParams
from nxd_trainer.script_helpers.gradients import allreduce_sequence_parallel_gradients, bucket_allreduce_gradients
from nxd_trainer.script_helpers.host import cpu_mode, get_local_world_size, is_pjrt_device
from nxd_trainer.script_helpers.init_device import init_on_device
from nxd_trainer.script_helpers.parameter_attributes import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
)
from nxd_trainer.script_helpers.rng_tracker import RngTracker, get_xla_rng_tracker
from nxd_trainer.script_helpers.tensors import (
    move_all_tensor_to_cpu,
    split_tensor_along_dim,
    split_tensor_along_last_dim,
)

__all__ = [
    "AdamW_FP32OptimParams",
    "bucket_allreduce_gradients",
    "allreduce_sequence_parallel_gradients",
    "get_xla_rng_tracker",
    "RngTracker",
    "set_tensor_model_parallel_attributes",
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
    "move_all_tensor_to_cpu",
    "init_on_device",
    "cpu_mode",
    "is_pjrt_device",
    "get_local_world_size",
]
