"""`neuronx_distributed.utils.activation_checkpoint`: recomputation in backward, from nxd_neuronx."""

from nxd_neuronx.activation_checkpoint import NxDCheckpointWrapper, apply_activation_checkpointing, checkpoint_wrapper

__all__ = ["NxDCheckpointWrapper", "apply_activation_checkpointing", "checkpoint_wrapper"]
