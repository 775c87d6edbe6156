"""`neuronx_distributed.optimizer.zero_redundancy_optimizer`: ZeRO-1, from nxd_optim."""

from nxd_neuronx.optimizers import NeuronEPZero1Optimizer
from nxd_optim.zero1 import NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer", "NeuronEPZero1Optimizer"]
