"""`neuronx_distributed.quantization.observer`: from nxd_neuronx."""

from nxd_neuronx.quantization import PerChannelAbsMaxObserver

__all__ = ["PerChannelAbsMaxObserver"]
