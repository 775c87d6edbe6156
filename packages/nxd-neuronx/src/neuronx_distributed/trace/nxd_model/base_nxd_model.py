"""`neuronx_distributed.trace.nxd_model.base_nxd_model`: the base of compiled models."""

from nxd_neuronx.traced_model import BaseNxDModel
from nxd_neuronx.unsupported import explains

__all__ = ["BaseNxDModel"]
__getattr__ = explains(__name__)
