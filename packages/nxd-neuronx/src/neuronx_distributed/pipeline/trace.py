"""`neuronx_distributed.pipeline.trace`: models as graphs, from nxd_neuronx."""

from nxd_neuronx.pipeline_parts import (
    HFTracerWrapper,
    NxDTracer,
    TorchTracerWrapper,
    get_concrete_args,
    get_tracer_class,
    trace_model,
)

__all__ = [
    "HFTracerWrapper",
    "NxDTracer",
    "TorchTracerWrapper",
    "get_concrete_args",
    "get_tracer_class",
    "trace_model",
]
