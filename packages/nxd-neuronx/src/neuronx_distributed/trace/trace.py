"""`neuronx_distributed.trace.trace`: the tracing calls, from nxd_trace."""

from nxd_neuronx.not_here import not_here
from nxd_neuronx.tensors import invoke_preshard_hooks as invoke_preshard_hook
from nxd_neuronx.traced_model import parallel_model_load, parallel_model_trace
from nxd_trace import TensorParallelModel, parallel_model_save

ParallelModel = TensorParallelNeuronModel = TensorParallelModel
(
    collect_tp_bucket_neuron_models,
    collect_tp_neuron_models,
    create_local_weight,
    create_local_weight_qkv,
    create_local_weight_with_expert_parallel,
    find_unique_dtypes,
    generate_ranked_folder,
    get_sharded_checkpoint,
    preprocess_checkpoint,
    shard_children,
) = not_here(
    __name__,
    "hlo",
    "collect_tp_bucket_neuron_models",
    "collect_tp_neuron_models",
    "create_local_weight",
    "create_local_weight_qkv",
    "create_local_weight_with_expert_parallel",
    "find_unique_dtypes",
    "generate_ranked_folder",
    "get_sharded_checkpoint",
    "preprocess_checkpoint",
    "shard_children",
)

__all__ = [
    "TensorParallelModel",
    "parallel_model_load",
    "parallel_model_save",
    "parallel_model_trace",
    "collect_tp_bucket_neuron_models",
    "collect_tp_neuron_models",
    "create_local_weight",
    "create_local_weight_qkv",
    "create_local_weight_with_expert_parallel",
    "find_unique_dtypes",
    "generate_ranked_folder",
    "get_sharded_checkpoint",
    "invoke_preshard_hook",
    "preprocess_checkpoint",
    "shard_children",
    "ParallelModel",
    "TensorParallelNeuronModel",
]
