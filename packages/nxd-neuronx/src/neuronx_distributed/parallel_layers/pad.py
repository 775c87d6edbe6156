"""`neuronx_distributed.parallel_layers.pad`: padding of attention heads from nxd_layers."""

from nxd_layers.padding import (
    generate_padding_mask,
    get_number_of_extra_heads,
    pad_model,
)

__all__ = ["pad_model", "get_number_of_extra_heads", "generate_padding_mask"]
