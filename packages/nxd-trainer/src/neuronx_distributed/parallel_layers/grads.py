"""`neuronx_distributed.parallel_layers.grads`: gradient clipping from nxd_optim."""

from nxd_optim import clip_grad_norm

__all__ = ["clip_grad_norm"]
