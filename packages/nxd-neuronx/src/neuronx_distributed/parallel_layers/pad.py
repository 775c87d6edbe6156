"""`neuronx_distributed.parallel_layers.pad`: padding of attention heads from nxd_layers."""

from nxd_layers import padding
from nxd_layers.head_padding import pad_model
from nxd_layers.padding import generate_padding_mask
from nxd_neuronx.arguments import takes_names_too

get_number_of_extra_heads = takes_names_too(n_head="n_heads")(padding.get_number_of_extra_heads)

__all__ = ["pad_model", "get_number_of_extra_heads", "generate_padding_mask"]
