"""`neuronx_distributed.modules.moe.model`: mixture-of-experts layers, from nxd_layers."""

from nxd_trainer.compat.experts import MoE

__all__ = ["MoE"]
