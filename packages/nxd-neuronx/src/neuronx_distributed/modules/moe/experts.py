"""`neuronx_distributed.modules.moe.experts`: experts on as many tokens for each."""

from nxd_neuronx.expert_linears import Experts

__all__ = [
    "Experts",
]
