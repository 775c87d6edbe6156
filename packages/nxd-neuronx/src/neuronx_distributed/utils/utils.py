"""`neuronx_distributed.utils.utils`: Neuron hardware, from nxd_neuronx."""

from nxd_neuronx.process import hardware

__all__ = ["hardware"]
