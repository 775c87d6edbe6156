"""`neuronx_distributed.quantization.observer`: from nxd_trainer."""

from nxd_trainer.compat.quantization import PerChannelAbsMaxObserver

__all__ = ["PerChannelAbsMaxObserver"]
