"""The documented training API: a config, and a model, optimizer and checkpoints that follow it."""

from nxd_trainer.api.build import initialize_parallel_model
from nxd_trainer.api.checkpoint_loading import checkpoint_parts, load_checkpoint
from nxd_trainer.api.checkpoint_saving import finalize_checkpoint, save_checkpoint
from nxd_trainer.api.checkpoint_tags import delete_checkpoint, has_checkpoint
from nxd_trainer.api.config import complete_config, ensure_model_parallel, neuronx_distributed_config
from nxd_trainer.api.model import NxDModel
from nxd_trainer.api.optimizer import NxDOptimizer, initialize_parallel_optimizer

__all__ = [
    "neuronx_distributed_config",
    "complete_config",
    "ensure_model_parallel",
    "initialize_parallel_model",
    "NxDModel",
    "initialize_parallel_optimizer",
    "NxDOptimizer",
    "save_checkpoint",
    "load_checkpoint",
    "checkpoint_parts",
    "has_checkpoint",
    "delete_checkpoint",
    "finalize_checkpoint",
]
