"""`neuronx_distributed.quantization.quantization_layers`: layers with quantized weights, from nxd_layers."""

from nxd_neuronx.not_here import explains
from nxd_neuronx.quantization import QuantizedParallelLinearLayerStateDictAdaptor
from nxd_neuronx.quantized_layers import BaseQuantizeParallelLinear, QuantizedColumnParallel, QuantizedRowParallel

__all__ = [
    "BaseQuantizeParallelLinear",
    "QuantizedColumnParallel",
    "QuantizedRowParallel",
    "QuantizedParallelLinearLayerStateDictAdaptor",
]
__getattr__ = explains(__name__)
