"""`neuronx_distributed.modules.rms_norm`: the RMS norm of nxd_layers, with sequence parallelism."""

from nxd_layers import RMSNorm

__all__ = ["RMSNorm"]
