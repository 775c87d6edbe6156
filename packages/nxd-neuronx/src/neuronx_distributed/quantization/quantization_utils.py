"""`neuronx_distributed.quantization.quantization_utils`: tensors, models and states, from nxd_layers."""

from nxd_layers.quantization import QuantizedLinear, convert_qint8_to_int8_state_dict, extract_q_scale
from nxd_neuronx.quantization import (
    quantize_pytorch_model_per_channel_symmetric,
    quantize_pytorch_model_per_tensor_symmetric,
    quantize_static_quant_activations,
)

__all__ = [
    "QuantizedLinear",
    "convert_qint8_to_int8_state_dict",
    "extract_q_scale",
    "quantize_pytorch_model_per_channel_symmetric",
    "quantize_pytorch_model_per_tensor_symmetric",
    "quantize_static_quant_activations",
]
