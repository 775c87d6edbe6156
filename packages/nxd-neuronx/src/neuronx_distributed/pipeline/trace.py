"""`neuronx_distributed.pipeline.trace`: models traced to graphs, from nxd_neuronx."""

from nxd_neuronx.pipeline_parts import NxDTracer, get_concrete_args, trace_model

__all__ = ["NxDTracer", "get_concrete_args", "trace_model"]
