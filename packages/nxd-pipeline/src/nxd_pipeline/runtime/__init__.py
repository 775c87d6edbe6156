"""Running a schedule on the ranks of a pipeline: microbatches, messages, the executor, losses and tied weights."""

from nxd_pipeline.runtime.executor import Executor
from nxd_pipeline.runtime.gradient_sync import GradientSync
from nxd_pipeline.runtime.memory import StepMemory
from nxd_pipeline.runtime.microbatches import Microbatches, current_microbatch
from nxd_pipeline.runtime.p2p import P2PCommunicator

__all__ = [
    "Executor",
    "GradientSync",
    "Microbatches",
    "P2PCommunicator",
    "StepMemory",
    "current_microbatch",
]
