"""`neuronx_distributed.scripts.checkpoint_converter`: converts between whole weights and rank files, over nxd_ckpt."""

from nxd_neuronx.checkpoint_converter import CheckpointConverterBase

__all__ = ["CheckpointConverterBase"]
