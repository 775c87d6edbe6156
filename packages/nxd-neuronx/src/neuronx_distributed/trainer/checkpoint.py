"""`neuronx_distributed.trainer.checkpoint`: saving and loading, from nxd_engine."""

from nxd_engine.checkpoints.loading import load_checkpoint
from nxd_engine.checkpoints.saving import finalize_checkpoint, save_checkpoint
from nxd_engine.checkpoints.tags import has_checkpoint

g_iostate = None  # nothing is shared between saves: finalize_checkpoint waits for the one under way

__all__ = [
    "save_checkpoint",
    "load_checkpoint",
    "has_checkpoint",
    "finalize_checkpoint",
    "g_iostate",
]
