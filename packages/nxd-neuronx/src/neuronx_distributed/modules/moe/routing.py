"""`neuronx_distributed.modules.moe.routing`: routers, from nxd_layers."""

from nxd_layers.experts import RouterBase, RouterSinkhorn
from nxd_neuronx.experts import GroupLimitedRouter, RouterTopK

__all__ = ["RouterBase", "RouterSinkhorn", "GroupLimitedRouter", "RouterTopK"]
