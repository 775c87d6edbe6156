"""`neuronx_distributed.modules.rms_norm`: the norm of nxd_layers that may be sequence parallel."""

from nxd_layers import RMSNorm

__all__ = ["RMSNorm"]
