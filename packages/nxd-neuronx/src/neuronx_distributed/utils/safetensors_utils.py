"""`neuronx_distributed.utils.safetensors_utils`: tensors that share memory."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
