"""`neuronx_distributed.parallel_layers`: layers from nxd_layers, clipping from nxd_optim.

`save` and `load`, which import the whole engine, are imported when they are first used.
"""

import importlib
from typing import Any

from neuronx_distributed.parallel_layers import (
    grads,
    layer_norm,
    layers,
    loss_functions,
    mappings,
    pad,
    parallel_state,
    random,
    utils,
)
from neuronx_distributed.parallel_layers.grads import clip_grad_norm
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from neuronx_distributed.parallel_layers.parallel_state import initialize_model_parallel, move_model_to_device
from neuronx_distributed.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes, split_tensor_along_last_dim

_OF_CHECKPOINTING = ("save", "load")

__all__ = [
    "ParallelEmbedding",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "clip_grad_norm",
    "parallel_cross_entropy",
    "initialize_model_parallel",
    "move_model_to_device",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "get_xla_rng_tracker",
    "model_parallel_xla_manual_seed",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_last_dim",
    "grads",
    "layer_norm",
    "layers",
    "loss_functions",
    "mappings",
    "pad",
    "parallel_state",
    "random",
    "utils",
    "checkpointing",
    "save",
    "load",
]


def __getattr__(name: str) -> Any:
    if name == "checkpointing":
        return importlib.import_module(f"{__name__}.checkpointing")
    if name in _OF_CHECKPOINTING:
        return getattr(importlib.import_module(f"{__name__}.checkpointing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
