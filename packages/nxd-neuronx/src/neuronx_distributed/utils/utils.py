"""`neuronx_distributed.utils.utils`: kinds of hardware, from nxd_neuronx."""

from nxd_neuronx.process import hardware

__all__ = ["hardware"]
