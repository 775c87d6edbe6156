"""`neuronx_distributed.trainer.checkpoint`: saving and loading, from nxd_trainer."""

from nxd_trainer.api.checkpoint_loading import load_checkpoint
from nxd_trainer.api.checkpoint_saving import finalize_checkpoint, save_checkpoint
from nxd_trainer.api.checkpoint_tags import has_checkpoint

__all__ = ["save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint"]
