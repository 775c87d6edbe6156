"""`neuronx_distributed.modules.rms_norm`: the norm of nxd_layers that may be sequence parallel."""

from nxd_layers import (
    RMSNorm,
)
from nxd_neuronx.layers import (
    manual_rms_norm,
)

__all__ = [
    "RMSNorm",
    "manual_rms_norm",
]
