"""`neuronx_distributed.trace`: tracing for inference, from nxd_trace."""

from nxd_neuronx.traced_model import parallel_model_load, parallel_model_trace
from nxd_trace import BucketModelConfig, TensorParallelModel, parallel_model_save

from neuronx_distributed.trace import trace
from neuronx_distributed.trace.functions import shard_checkpoint
from neuronx_distributed.trace.model_builder import ModelBuilder
from neuronx_distributed.trace.spmd import NxDModel, SPMDBucketModelScript

__all__ = [
    "BucketModelConfig",
    "TensorParallelModel",
    "parallel_model_load",
    "parallel_model_save",
    "parallel_model_trace",
    "trace",
    "shard_checkpoint",
    "ModelBuilder",
    "NxDModel",
    "SPMDBucketModelScript",
]
