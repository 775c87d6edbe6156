"""`neuronx_distributed.quantization.quantization_layers`: layers with quantized weights, from nxd_layers."""

from nxd_neuronx.quantization import BaseQuantizeParallelLinear, QuantizedColumnParallel, QuantizedRowParallel
from nxd_neuronx.unsupported import explains

__all__ = ["BaseQuantizeParallelLinear", "QuantizedColumnParallel", "QuantizedRowParallel"]
__getattr__ = explains(__name__)
