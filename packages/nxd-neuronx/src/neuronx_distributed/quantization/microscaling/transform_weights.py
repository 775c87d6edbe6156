"""`neuronx_distributed.quantization.microscaling.transform_weights`: 4- and 8-bit floats, from nxd_neuronx."""

from nxd_neuronx.microscaling import (
    FP4_VALUES,
    apply_lut_byte_4bit_tensor,
    get_mxfp4_tensor,
    get_mxfp4_tensor_from_uint16,
    pack_byte_4bit_tensor,
    pack_fp4_x4_uint16,
    split_byte_4bit_tensor,
)

__all__ = [
    "FP4_VALUES",
    "apply_lut_byte_4bit_tensor",
    "get_mxfp4_tensor",
    "get_mxfp4_tensor_from_uint16",
    "pack_byte_4bit_tensor",
    "pack_fp4_x4_uint16",
    "split_byte_4bit_tensor",
]
