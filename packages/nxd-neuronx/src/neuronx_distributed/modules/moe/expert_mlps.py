"""`neuronx_distributed.modules.moe.expert_mlps`: the feed-forward networks of experts, from nxd_layers."""

from nxd_neuronx.experts import ExpertMLPs

__all__ = ["ExpertMLPs"]
