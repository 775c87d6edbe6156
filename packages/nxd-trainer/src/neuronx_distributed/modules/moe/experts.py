"""`neuronx_distributed.modules.moe.experts`: experts on as many tokens for each."""

from nxd_trainer.compat.expert_linears import Experts

__all__ = [
    "Experts",
]
