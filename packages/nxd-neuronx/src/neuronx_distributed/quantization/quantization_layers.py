"""`neuronx_distributed.quantization.quantization_layers`: layers with quantized weights, from nxd_layers."""

from nxd_layers.quantization import BaseQuantizeParallelLinear, QuantizedColumnParallel, QuantizedRowParallel
from nxd_neuronx.not_here import not_here
from nxd_neuronx.quantization import QuantizedParallelLinearLayerStateDictAdaptor

(QuantizedExpertFusedColumnParallel, QuantizedExpertFusedRowParallel) = not_here(
    __name__, "quantized experts", "QuantizedExpertFusedColumnParallel", "QuantizedExpertFusedRowParallel"
)

__all__ = [
    "BaseQuantizeParallelLinear",
    "QuantizedColumnParallel",
    "QuantizedRowParallel",
    "QuantizedParallelLinearLayerStateDictAdaptor",
    "QuantizedExpertFusedColumnParallel",
    "QuantizedExpertFusedRowParallel",
]
