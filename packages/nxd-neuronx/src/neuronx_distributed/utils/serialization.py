"""`neuronx_distributed.utils.serialization`: serialization of values between stages."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
