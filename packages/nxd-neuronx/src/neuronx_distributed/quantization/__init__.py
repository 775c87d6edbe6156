"""`neuronx_distributed.quantization`: int8 and fp8 weights, by nxd_layers."""

from neuronx_distributed.quantization import (
    dequantize,
    observer,
    quantization_config,
    quantization_layers,
    quantization_mappings,
    quantization_utils,
    quantize,
)

__all__ = [
    "dequantize",
    "observer",
    "quantization_config",
    "quantization_layers",
    "quantization_mappings",
    "quantization_utils",
    "quantize",
]
