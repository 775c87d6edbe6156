"""`neuronx_distributed.quantization.observer`: observers of torch, which are not needed here."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
