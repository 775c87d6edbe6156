"""`neuronx_distributed.quantization.quantize`: whole models, from nxd_layers."""

from nxd_layers.quantization import convert
from nxd_neuronx.quantization import direct_cast_quantize

__all__ = ["convert", "direct_cast_quantize"]
