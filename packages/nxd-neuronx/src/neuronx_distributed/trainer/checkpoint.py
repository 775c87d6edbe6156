"""`neuronx_distributed.trainer.checkpoint`: saving and loading, from nxd_engine and nxd_neuronx."""

from nxd_engine.checkpoints.loading import load_checkpoint
from nxd_engine.checkpoints.saving import finalize_checkpoint, save_checkpoint
from nxd_engine.checkpoints.tags import has_checkpoint
from nxd_neuronx.checkpoint_storage import CheckpointIOState

g_iostate = None  # nothing is shared between saves: finalize_checkpoint waits for the one under way
is_interpreter_active = True

__all__ = [
    "save_checkpoint",
    "load_checkpoint",
    "has_checkpoint",
    "finalize_checkpoint",
    "CheckpointIOState",
    "g_iostate",
    "is_interpreter_active",
]
