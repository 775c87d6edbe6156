"""`neuronx_distributed.modules.moe.shared_experts`: experts that process every token, over nxd_layers."""

from nxd_neuronx.experts import SharedExperts

__all__ = ["SharedExperts"]
