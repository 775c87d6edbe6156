"""`neuronx_distributed.quantization.observer`: observers of torch, which are not needed here."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
