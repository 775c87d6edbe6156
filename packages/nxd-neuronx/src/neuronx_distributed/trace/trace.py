"""`neuronx_distributed.trace.trace`: the tracing calls, from nxd_trace."""

from nxd_neuronx.tensors import invoke_preshard_hooks as invoke_preshard_hook
from nxd_neuronx.traced_model import parallel_model_load, parallel_model_trace
from nxd_neuronx.unsupported import explains
from nxd_trace import TensorParallelModel, parallel_model_save

ParallelModel = TensorParallelNeuronModel = TensorParallelModel

__all__ = [
    "TensorParallelModel",
    "parallel_model_load",
    "parallel_model_save",
    "parallel_model_trace",
    "invoke_preshard_hook",
    "ParallelModel",
    "TensorParallelNeuronModel",
]
__getattr__ = explains(__name__)
