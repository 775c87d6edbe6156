"""`neuronx_distributed.trace.spmd`: compiled models, over nxd_trace."""

from nxd_neuronx.traced_model import NxDModel, NxDModelExecutor
from nxd_neuronx.unsupported import explains

__all__ = ["NxDModel", "NxDModelExecutor"]
__getattr__ = explains(__name__)
