"""`neuronx_distributed.quantization.quantize`: whole models, from nxd_layers."""

from nxd_neuronx.quantized_layers import convert

__all__ = ["convert"]
