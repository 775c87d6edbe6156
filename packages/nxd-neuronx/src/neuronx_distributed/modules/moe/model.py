"""`neuronx_distributed.modules.moe.model`: mixture-of-experts layers, from nxd_layers."""

from nxd_neuronx.experts import MoE

__all__ = ["MoE"]
