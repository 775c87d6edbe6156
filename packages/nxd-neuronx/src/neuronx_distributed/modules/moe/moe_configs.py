"""`neuronx_distributed.modules.moe.moe_configs`: configurations of mixture-of-experts layers."""

from nxd_neuronx.expert_configs import (
    BlockwiseMatmulConfig,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    to_torch_dtype,
)

__all__ = ["BlockwiseMatmulConfig", "MoEFusedTKGConfig", "RoutedExpertsMLPOpsConfig", "RouterConfig", "to_torch_dtype"]
