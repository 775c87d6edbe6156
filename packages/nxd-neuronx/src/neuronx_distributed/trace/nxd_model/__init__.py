"""`neuronx_distributed.trace.nxd_model`: compiled models, over nxd_trace."""

from neuronx_distributed.trace.nxd_model.base_nxd_model import BaseNxDModel
from neuronx_distributed.trace.nxd_model.nxd_model import NxDModel

__all__ = ["BaseNxDModel", "NxDModel"]
