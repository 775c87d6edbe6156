"""Running a schedule on the ranks of a pipeline: microbatches, messages, the executor, losses and tied weights."""

from nxd_pipeline.runtime.executor import Executor
from nxd_pipeline.runtime.gradient_sync import GradientSync
from nxd_pipeline.runtime.loss import LossSpec, pick_loss
from nxd_pipeline.runtime.memory import StepMemory
from nxd_pipeline.runtime.microbatches import current_microbatch, forward_of, split_batch
from nxd_pipeline.runtime.p2p import P2PCommunicator
from nxd_pipeline.runtime.tied_weights import TiedWeights

__all__ = [
    "Executor",
    "GradientSync",
    "LossSpec",
    "P2PCommunicator",
    "StepMemory",
    "TiedWeights",
    "current_microbatch",
    "forward_of",
    "pick_loss",
    "split_batch",
]
