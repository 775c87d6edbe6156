"""`neuronx_distributed.parallel_layers`: layers from nxd_layers, clipping from nxd_optim.

`save` and `load`, which bring in all of the trainer, are imported when they are first used.
"""

import importlib
from typing import Any

from neuronx_distributed.parallel_layers import (
    grads,
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
from neuronx_distributed.parallel_layers.parallel_state import move_model_to_device

_OF_CHECKPOINTING = ("save", "load")

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
