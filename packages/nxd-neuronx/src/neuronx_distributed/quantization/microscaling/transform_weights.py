"""`neuronx_distributed.quantization.microscaling.transform_weights`: 4- and 8-bit floats, from nxd_neuronx."""

from nxd_neuronx.microscaling import (
    FP4_VALUES,
    apply_lut_byte_4bit_tensor,
    dequant_byte_4bit_tensor,
    get_mxfp4_tensor,
    get_mxfp4_tensor_from_uint16,
    get_mxfp8_tensor_from_uint32,
    pack_byte_4bit_tensor,
    pack_fp4_x4_uint16,
    split_byte_4bit_tensor,
    split_gate_up,
)
from nxd_neuronx.not_here import explains

__all__ = [
    "FP4_VALUES",
    "apply_lut_byte_4bit_tensor",
    "dequant_byte_4bit_tensor",
    "get_mxfp4_tensor",
    "get_mxfp4_tensor_from_uint16",
    "pack_byte_4bit_tensor",
    "pack_fp4_x4_uint16",
    "split_byte_4bit_tensor",
    "split_gate_up",
    "get_mxfp8_tensor_from_uint32",
]
__getattr__ = explains(__name__)
