"""`neuronx_distributed.parallel_layers`: layers from nxd_layers, clipping from nxd_optim."""

from neuronx_distributed.parallel_layers import grads, layers, loss_functions, mappings, pad, parallel_state, utils
from neuronx_distributed.parallel_layers.grads import clip_grad_norm
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.parallel_state import move_model_to_device

__all__ = [
    "ParallelEmbedding",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "clip_grad_norm",
    "move_model_to_device",
    "grads",
    "layers",
    "loss_functions",
    "mappings",
    "pad",
    "parallel_state",
    "utils",
]
