"""Invisible padding of split dims that the tensor-parallel degree does not divide.

Padding is zeros at the end of the logical dim, in no piece of the shard metadata: checkpoints and gradient norms do
not see it, and its gradient is zero, so that it stays zero. `model` pads a whole model to a divisible number of
attention heads; the layers of `nxd_layers.linear` hold the padded weights.
"""

from nxd_layers.padding.heads import divide, generate_padding_mask, get_number_of_extra_heads
from nxd_layers.padding.model import pad_model

__all__ = ["pad_model", "get_number_of_extra_heads", "generate_padding_mask", "divide"]
