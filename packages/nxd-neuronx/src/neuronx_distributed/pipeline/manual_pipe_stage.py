"""`neuronx_distributed.pipeline.manual_pipe_stage`: stages of a list of layers, from nxd_neuronx."""

from nxd_neuronx.pipeline_parts import WEIGHT_SHARING_ATTR_NAME, PipelineStageModule

__all__ = ["WEIGHT_SHARING_ATTR_NAME", "PipelineStageModule"]
