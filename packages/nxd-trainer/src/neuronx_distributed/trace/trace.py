"""`neuronx_distributed.trace.trace`: the tracing calls, from nxd_trace."""

from nxd_trace import TensorParallelModel, parallel_model_load, parallel_model_save, parallel_model_trace

__all__ = ["parallel_model_trace", "parallel_model_save", "parallel_model_load", "TensorParallelModel"]
