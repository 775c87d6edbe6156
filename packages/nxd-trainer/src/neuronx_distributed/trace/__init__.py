"""`neuronx_distributed.trace`: tracing for inference, from nxd_trace."""

from nxd_trace import (
    BucketModelConfig,
    ModelBuilder,
    TensorParallelModel,
    parallel_model_load,
    parallel_model_save,
    parallel_model_trace,
    shard_checkpoint,
)

from neuronx_distributed.trace import trace

__all__ = [
    "parallel_model_trace",
    "parallel_model_save",
    "parallel_model_load",
    "BucketModelConfig",
    "ModelBuilder",
    "shard_checkpoint",
    "TensorParallelModel",
    "trace",
]
