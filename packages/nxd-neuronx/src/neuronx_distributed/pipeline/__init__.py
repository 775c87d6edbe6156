"""`neuronx_distributed.pipeline`: the pipeline model of nxd_pipeline, and its parts."""

from neuronx_distributed.pipeline import comm, manual_pipe_stage, model, partition, scheduler, trace
from neuronx_distributed.pipeline.model import NxDPPModel

__all__ = ["comm", "manual_pipe_stage", "model", "partition", "scheduler", "trace", "NxDPPModel"]
