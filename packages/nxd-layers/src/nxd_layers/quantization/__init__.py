"""Weights in int8 or fp8 with scales, per tensor or per output channel: tensors, parallel layers, whole models."""

from nxd_layers.quantization.layers import (
    BaseQuantizeParallelLinear,
    QuantizedColumnParallel,
    QuantizedLinear,
    QuantizedRowParallel,
)
from nxd_layers.quantization.model import (
    MODULE_MAPPINGS,
    convert,
    convert_qint8_to_int8_state_dict,
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
    "dequantize",
    "blockwise_dequantize",
    "broadcastable_block_shapes",
    "quantize_to_qint8",
    "extract_q_scale",
    # layers
    "BaseQuantizeParallelLinear",
    "QuantizedColumnParallel",
    "QuantizedRowParallel",
    "QuantizedLinear",
    # models
    "convert",
    "quantize_linears",
    "MODULE_MAPPINGS",
    "convert_qint8_to_int8_state_dict",
]
