"""`neuronx_distributed.quantization.dequantize`: dequantization of tensors, from nxd_layers."""

from nxd_layers.quantization import (
    broadcastable_block_shapes as get_broadcastable_shapes_for_blockwise_scale_dequantize,
)
from nxd_neuronx.quantization import blockwise_scale_dequantize, direct_cast_dequantize, scale_dequantize

__all__ = [
    "get_broadcastable_shapes_for_blockwise_scale_dequantize",
    "blockwise_scale_dequantize",
    "direct_cast_dequantize",
    "scale_dequantize",
]
