"""`neuronx_distributed.modules.moe.shared_experts`: experts that take every token, over nxd_layers."""

from nxd_neuronx.experts import SharedExperts
from nxd_neuronx.not_here import explains

__all__ = ["SharedExperts"]
__getattr__ = explains(__name__)
