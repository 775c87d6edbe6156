"""`neuronx_distributed.pipeline.model`: the pipeline model of nxd_pipeline."""

from nxd_pipeline import NxDPPModel

__all__ = ["NxDPPModel"]
