"""`neuronx_distributed.pipeline`: the pipeline model of nxd_pipeline."""

from neuronx_distributed.pipeline import model
from neuronx_distributed.pipeline.model import NxDPPModel

__all__ = ["NxDPPModel", "model"]
