"""`neuronx_distributed.parallel_layers.grads`: norms, clipping and reduction of gradients, from nxd_neuronx."""

from nxd_neuronx.gradients import (
    allreduce_context_parallel_gradients,
    allreduce_sequence_parallel_gradients,
    bucket_allreduce_gradients,
    clip_grad_norm,
    clip_grads_with_norm,
    get_grad_norm,
    param_is_not_shared,
)
from nxd_neuronx.tensors import (
    param_is_not_tensor_parallel_duplicate,
)

__all__ = [
    "clip_grad_norm",
    "get_grad_norm",
    "clip_grads_with_norm",
    "param_is_not_shared",
    "bucket_allreduce_gradients",
    "allreduce_sequence_parallel_gradients",
    "allreduce_context_parallel_gradients",
    "param_is_not_tensor_parallel_duplicate",
]
