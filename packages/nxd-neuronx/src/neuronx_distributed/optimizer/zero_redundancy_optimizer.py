"""`neuronx_distributed.optimizer.zero_redundancy_optimizer`: ZeRO-1, from nxd_optim."""

from nxd_optim import NeuronZero1Optimizer

NeuronEPZero1Optimizer = NeuronZero1Optimizer  # it knows the replicas of each parameter, an expert's too

__all__ = ["NeuronZero1Optimizer", "NeuronEPZero1Optimizer"]
