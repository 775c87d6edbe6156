"""`neuronx_distributed.trace.nxd_model.base_nxd_model`: the base of compiled models."""

from nxd_neuronx.not_here import not_here
from nxd_neuronx.traced_model import BaseNxDModel

(StateInitializer,) = not_here(__name__, "hlo", "StateInitializer")

__all__ = ["BaseNxDModel", "StateInitializer"]
