"""`neuronx_distributed.quantization.observer`: from nxd_trainer."""

from nxd_neuronx.quantization import PerChannelAbsMaxObserver

__all__ = ["PerChannelAbsMaxObserver"]
