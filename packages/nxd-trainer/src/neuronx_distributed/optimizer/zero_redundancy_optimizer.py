"""`neuronx_distributed.optimizer.zero_redundancy_optimizer`: ZeRO-1, from nxd_optim."""

from nxd_optim.zero1 import NeuronZero1Optimizer
from nxd_trainer.compat.optimizers import NeuronEPZero1Optimizer

__all__ = ["NeuronZero1Optimizer", "NeuronEPZero1Optimizer"]
