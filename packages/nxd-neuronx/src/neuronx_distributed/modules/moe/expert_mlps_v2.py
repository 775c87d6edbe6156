"""`neuronx_distributed.modules.moe.expert_mlps_v2`: the feed-forward networks of experts, from nxd_layers."""

from nxd_neuronx.experts import ExpertMLPsV2
from nxd_neuronx.not_here import not_here

(
    create_spmd_ranks,
    duplicate_and_replace_prefixes,
    can_use_find_index_kernel,
) = not_here(
    __name__,
    "experts",
    "create_spmd_ranks",
    "duplicate_and_replace_prefixes",
    "can_use_find_index_kernel",
)

__all__ = [
    "ExpertMLPsV2",
    "create_spmd_ranks",
    "duplicate_and_replace_prefixes",
    "can_use_find_index_kernel",
]
