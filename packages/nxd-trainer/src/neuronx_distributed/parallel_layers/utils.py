"""`neuronx_distributed.parallel_layers.utils`: exact division from nxd_layers."""

from nxd_layers.padding import divide

__all__ = ["divide"]
