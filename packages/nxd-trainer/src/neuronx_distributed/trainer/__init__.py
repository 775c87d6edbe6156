"""`neuronx_distributed.trainer`: the documented training API, from nxd_trainer."""

from nxd_trainer.api import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config

from neuronx_distributed.trainer import checkpoint, model, optimizer
from neuronx_distributed.trainer.checkpoint import (
    finalize_checkpoint,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from neuronx_distributed.trainer.model import NxDModel
from neuronx_distributed.trainer.optimizer import NxDOptimizer

__all__ = [
    "neuronx_distributed_config",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "save_checkpoint",
    "load_checkpoint",
    "has_checkpoint",
    "finalize_checkpoint",
    "NxDModel",
    "NxDOptimizer",
    "checkpoint",
    "model",
    "optimizer",
]
