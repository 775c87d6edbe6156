"""`neuronx_distributed.quantization.microscaling.transform_weights`: layouts that only NKI kernels read."""

from nxd_trainer.compat.not_here import not_here
from nxd_trainer.compat.quantization import FP4_VALUES

(
    apply_lut_byte_4bit_tensor,
    dequant_byte_4bit_tensor,
    get_mxfp4_tensor,
    get_mxfp4_tensor_from_uint16,
    get_mxfp8_tensor_from_uint32,
    pack_byte_4bit_tensor,
    pack_fp4_x4_uint16,
    reshape_pad_proj,
    split_byte_4bit_tensor,
    split_gate_up,
) = not_here(
    __name__,
    "mx",
    "apply_lut_byte_4bit_tensor",
    "dequant_byte_4bit_tensor",
    "get_mxfp4_tensor",
    "get_mxfp4_tensor_from_uint16",
    "get_mxfp8_tensor_from_uint32",
    "pack_byte_4bit_tensor",
    "pack_fp4_x4_uint16",
    "reshape_pad_proj",
    "split_byte_4bit_tensor",
    "split_gate_up",
)

__all__ = [
    "FP4_VALUES",
    "apply_lut_byte_4bit_tensor",
    "dequant_byte_4bit_tensor",
    "get_mxfp4_tensor",
    "get_mxfp4_tensor_from_uint16",
    "get_mxfp8_tensor_from_uint32",
    "pack_byte_4bit_tensor",
    "pack_fp4_x4_uint16",
    "reshape_pad_proj",
    "split_byte_4bit_tensor",
    "split_gate_up",
]
