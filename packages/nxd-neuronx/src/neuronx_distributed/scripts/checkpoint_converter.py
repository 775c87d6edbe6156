"""`neuronx_distributed.scripts.checkpoint_converter`: whole weights and ranks' files, over nxd_ckpt."""

from nxd_neuronx.checkpoint_converter import CheckpointConverterBase

__all__ = ["CheckpointConverterBase"]
