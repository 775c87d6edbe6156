"""`neuronx_distributed.quantization.quantization_config`: how weights are quantized, from nxd_layers."""

from functools import partial

from nxd_layers.quantization import (
    ActivationQuantizationType,
    DtypeBound,
    QuantizationConfig,
    QuantizationType,
    QuantizedDtype,
    ScaleDtype,
    default_config,
)
from nxd_neuronx.quantization import KVQuantizationConfig

BASE_QCONFIG_DICT_TYPE = PER_CHANNEL_QCONFIG_DICT_TYPE = QuantizationConfig
EXPERT_WISE_PER_CHANNEL_QCONFIG_DICT_TYPE = BLOCKWISE_QCONFIG_DICT_TYPE = QuantizationConfig
MyEnumMeta = type(QuantizationType)

get_default_custom_qconfig_dict = default_config
get_default_per_channel_custom_qconfig_dict = partial(default_config, QuantizationType.PER_CHANNEL_SYMMETRIC)
get_default_blockwise_custom_qconfig_dict = partial(default_config, QuantizationType.BLOCKWISE_SYMMETRIC)
get_default_expert_wise_per_channel_custom_qconfig_dict = partial(
    default_config, QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC
)
get_float4x4_torch_dtype = partial(QuantizedDtype.get_dtype, "F4E2M1FN_X4")

__all__ = [
    "ActivationQuantizationType",
    "DtypeBound",
    "KVQuantizationConfig",
    "QuantizationType",
    "QuantizedDtype",
    "ScaleDtype",
    "BASE_QCONFIG_DICT_TYPE",
    "PER_CHANNEL_QCONFIG_DICT_TYPE",
    "EXPERT_WISE_PER_CHANNEL_QCONFIG_DICT_TYPE",
    "BLOCKWISE_QCONFIG_DICT_TYPE",
    "MyEnumMeta",
    "get_default_custom_qconfig_dict",
    "get_default_per_channel_custom_qconfig_dict",
    "get_default_blockwise_custom_qconfig_dict",
    "get_default_expert_wise_per_channel_custom_qconfig_dict",
    "get_float4x4_torch_dtype",
]
