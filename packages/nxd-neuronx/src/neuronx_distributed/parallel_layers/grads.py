"""`neuronx_distributed.parallel_layers.grads`: norms, clipping and reduction of gradients, from nxd_neuronx."""

from nxd_neuronx.optimizer import bucket_allreduce_gradients, clip_grad_norm, clip_grads_with_norm, get_grad_norm
from nxd_neuronx.tensors import param_is_not_tensor_parallel_duplicate

__all__ = [
    "clip_grad_norm",
    "get_grad_norm",
    "clip_grads_with_norm",
    "bucket_allreduce_gradients",
    "param_is_not_tensor_parallel_duplicate",
]
