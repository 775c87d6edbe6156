"""`neuronx_distributed.modules.attention`: parts of attention, from nxd_layers."""

from neuronx_distributed.modules.attention import utils

__all__ = ["utils"]
