"""`neuronx_distributed.trainer.checkpoint`: saving and loading, from nxd_trainer."""

from nxd_trainer.api.checkpoint import load_checkpoint, save_checkpoint
from nxd_trainer.api.checkpoint_tags import has_checkpoint
from nxd_trainer.api.pending_save import finalize_checkpoint

__all__ = ["save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint"]
