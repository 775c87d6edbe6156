"""`neuronx_distributed.trace.spmd`: compiled models, over nxd_trace."""

from nxd_neuronx.not_here import explains
from nxd_neuronx.traced_model import NxDModel, NxDModelExecutor

__all__ = ["NxDModel", "NxDModelExecutor"]
__getattr__ = explains(__name__)
