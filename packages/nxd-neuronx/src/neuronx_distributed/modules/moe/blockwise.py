"""`neuronx_distributed.modules.moe.blockwise`: settings and inputs of the kernel that multiplies tokens in blocks."""

from nxd_neuronx.expert_configs import BlockShardStrategy
from nxd_neuronx.unsupported import explains

__all__ = ["BlockShardStrategy"]
__getattr__ = explains(__name__)
