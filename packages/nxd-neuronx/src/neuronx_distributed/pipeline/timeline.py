"""`neuronx_distributed.pipeline.timeline`: a pipeline's own events, from nxd_neuronx."""

from nxd_neuronx.timeline import PPTimeline

__all__ = ["PPTimeline"]
