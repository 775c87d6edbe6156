"""`neuronx_distributed.optimizer`: the ZeRO-1 optimizer of nxd_optim."""

from neuronx_distributed.optimizer import zero_redundancy_optimizer
from neuronx_distributed.optimizer.zero_redundancy_optimizer import NeuronEPZero1Optimizer, NeuronZero1Optimizer

__all__ = ["zero_redundancy_optimizer", "NeuronEPZero1Optimizer", "NeuronZero1Optimizer"]
