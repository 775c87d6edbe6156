"""`neuronx_distributed.optimizer`: the ZeRO-1 optimizer of nxd_optim."""

from nxd_optim.zero1 import NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer"]
