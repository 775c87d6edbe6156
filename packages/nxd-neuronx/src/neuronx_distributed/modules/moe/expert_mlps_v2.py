"""`neuronx_distributed.modules.moe.expert_mlps_v2`: the feed-forward networks of experts, from nxd_layers."""

from nxd_neuronx.experts import ExpertMLPsV2
from nxd_neuronx.unsupported import explains

__all__ = ["ExpertMLPsV2"]
__getattr__ = explains(__name__)
