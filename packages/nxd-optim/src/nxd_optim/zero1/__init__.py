"""ZeRO stage 1: an optimizer whose states are sharded over the replicas, in flat buckets."""

from nxd_optim.zero1.gradients import OwnGradient, counted_parts
from nxd_optim.zero1.memory_report import MemoryBytes, MemoryReport
from nxd_optim.zero1.optimizer import NeuronZero1Optimizer
from nxd_optim.zero1.state import MASTER_KEY, StateShard, StateTensor

ZeroRedundancyOptimizer = NeuronZero1Optimizer  # torch-xla's name

__all__ = [
    "NeuronZero1Optimizer",
    "ZeroRedundancyOptimizer",
    "StateTensor",
    "StateShard",
    "MASTER_KEY",
    "OwnGradient",
    "counted_parts",
    "MemoryReport",
    "MemoryBytes",
]
