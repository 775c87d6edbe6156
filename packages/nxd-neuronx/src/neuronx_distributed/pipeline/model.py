"""`neuronx_distributed.pipeline.model`: the pipeline model of nxd_pipeline."""

from nxd_neuronx.pipeline_parts import INPUTS_ARG_NAME, LABLES_ARG_NAME, mark_timeline
from nxd_pipeline import NxDPPModel

__all__ = ["NxDPPModel", "INPUTS_ARG_NAME", "LABLES_ARG_NAME", "mark_timeline"]
