"""Weights in int8 or fp8 with scales, per tensor or per output channel: tensors, parallel layers, whole models."""

from nxd_layers.quantization.layers import QuantizedLinear, quantize_weight, use_quantized_weight
from nxd_layers.quantization.model import (
    PARALLEL_LINEARS,
    convert,
    convert_qint8_to_int8_state_dict,
    copy_with_metadata,
    quantize_linears,
)
from nxd_layers.quantization.tensors import (
    ActivationQuantizationType,
    DtypeBound,
    QuantizationConfig,
    QuantizationType,
    QuantizedDtype,
    ScaleDtype,
    blockwise_dequantize,
    broadcastable_block_shapes,
    default_config,
    dequantize,
    extract_q_scale,
    quantize,
    quantize_fp8_blocks,
    quantize_to_qint8,
)

__all__ = [
    # how
    "QuantizationType",
    "QuantizedDtype",
    "ScaleDtype",
    "ActivationQuantizationType",
    "QuantizationConfig",
    "default_config",
    "DtypeBound",
    # tensors
    "quantize",
    "quantize_fp8_blocks",
    "dequantize",
    "blockwise_dequantize",
    "broadcastable_block_shapes",
    "quantize_to_qint8",
    "extract_q_scale",
    # layers
    "quantize_weight",
    "use_quantized_weight",
    "QuantizedLinear",
    # models
    "convert",
    "quantize_linears",
    "PARALLEL_LINEARS",
    "copy_with_metadata",
    "convert_qint8_to_int8_state_dict",
]
