"""`neuronx_distributed.parallel_layers.loss_functions`: the losses of nxd_layers."""

from nxd_layers import parallel_cross_entropy

__all__ = ["parallel_cross_entropy"]
