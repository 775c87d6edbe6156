"""`neuronx_distributed.modules.moe.moe_fused_tkg_mx`: the same, with microscaled weights."""

from nxd_neuronx.not_here import not_here

(
    ROUTER_ACT_FN_MAPPING,
    mxfp4_moe_block_tkg_wrapper,
    MoEFusedTKGMX,
) = not_here(
    __name__,
    "experts",
    "ROUTER_ACT_FN_MAPPING",
    "mxfp4_moe_block_tkg_wrapper",
    "MoEFusedTKGMX",
)

__all__ = [
    "ROUTER_ACT_FN_MAPPING",
    "mxfp4_moe_block_tkg_wrapper",
    "MoEFusedTKGMX",
]
