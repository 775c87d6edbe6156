"""`neuronx_distributed.modules.moe.moe_config_validator`: what checked configurations for kernels."""

from nxd_neuronx.not_here import not_here

(MoeConfigValidator,) = not_here(
    __name__,
    "experts",
    "MoeConfigValidator",
)

__all__ = [
    "MoeConfigValidator",
]
