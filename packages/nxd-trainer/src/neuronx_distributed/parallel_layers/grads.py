"""`neuronx_distributed.parallel_layers.grads`: clipping and reduction of gradients, from nxd_optim and nxd_trainer."""

from nxd_optim import clip_grad_norm
from nxd_trainer.script_helpers import allreduce_sequence_parallel_gradients, bucket_allreduce_gradients

__all__ = ["clip_grad_norm", "bucket_allreduce_gradients", "allreduce_sequence_parallel_gradients"]
