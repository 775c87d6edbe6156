"""`neuronx_distributed.modules.moe.moe_fused_tkg`: the kernel of a whole layer for single tokens."""

from nxd_neuronx.not_here import not_here

(
    ROUTER_ACT_FN_MAPPING,
    MoEFusedTKG,
) = not_here(
    __name__,
    "experts",
    "ROUTER_ACT_FN_MAPPING",
    "MoEFusedTKG",
)

__all__ = [
    "ROUTER_ACT_FN_MAPPING",
    "MoEFusedTKG",
]
