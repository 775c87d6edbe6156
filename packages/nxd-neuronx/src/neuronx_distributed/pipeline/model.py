"""`neuronx_distributed.pipeline.model`: the pipeline model of nxd_pipeline."""

from nxd_neuronx.pipeline_parts import trace_model
from nxd_pipeline import NxDPPModel

__all__ = ["NxDPPModel", "trace_model"]
