"""`neuronx_distributed.modules.moe.model_utils`: activations of experts, from nxd_layers."""

from nxd_trainer.compat.experts import ACT2FN

__all__ = ["ACT2FN"]
