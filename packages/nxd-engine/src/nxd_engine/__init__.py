"""The documented training API: a config, and a model, optimizer and checkpoints that follow it."""

from nxd_ckpt import CheckpointError

from nxd_engine.build import initialize_parallel_model
from nxd_engine.checkpoints.find import delete_checkpoint, has_checkpoint
from nxd_engine.checkpoints.load import checkpoint_parts, load_checkpoint
from nxd_engine.checkpoints.save import finalize_checkpoint, save_checkpoint
from nxd_engine.config import complete_config, ensure_model_parallel, neuronx_distributed_config
from nxd_engine.hugging_face.sending import send_weights
from nxd_engine.hugging_face.streaming import stream_weights
from nxd_engine.nxd_model import NxDModel
from nxd_engine.optimizer import NxDOptimizer, initialize_parallel_optimizer
from nxd_engine.rollout_engines import WeightSource, update_sglang_from_disk, update_sglang_from_distributed

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
    "stream_weights",
    "send_weights",
    "WeightSource",
    "update_sglang_from_disk",
    "update_sglang_from_distributed",
    "CheckpointError",
]
