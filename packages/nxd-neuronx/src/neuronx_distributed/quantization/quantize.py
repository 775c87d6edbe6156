"""`neuronx_distributed.quantization.quantize`: whole models, from nxd_layers."""

from nxd_neuronx.quantization import convert

__all__ = ["convert"]
