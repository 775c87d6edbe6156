"""ZeRO: an optimizer whose states, gradients and parameters are sharded over the replicas, in flat buckets."""

from nxd_optim.flat_shards import StateShard
from nxd_optim.state_tensors import StateTensor
from nxd_optim.zero.fully_sharded import FullySharded, fully_shard, parameters_by_unit
from nxd_optim.zero.optimizer import NeuronZero1Optimizer
from nxd_optim.zero.state import MASTER_KEY, MemoryBytes, MemoryReport

ZeroRedundancyOptimizer = NeuronZero1Optimizer  # torch-xla's name

__all__ = [
    "fully_shard",
    "FullySharded",
    "parameters_by_unit",
    "NeuronZero1Optimizer",
    "ZeroRedundancyOptimizer",
    "StateTensor",
    "StateShard",
    "MASTER_KEY",
    "MemoryReport",
    "MemoryBytes",
]
