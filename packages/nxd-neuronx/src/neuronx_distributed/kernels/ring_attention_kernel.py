"""`neuronx_distributed.kernels.ring_attention_kernel`: attention over a sequence that is cut over ranks."""

from nxd_neuronx.attention_kernels import get_seq_tile_size, nki_ring_attn_func
from nxd_neuronx.not_here import explains

__all__ = ["get_seq_tile_size", "nki_ring_attn_func"]
__getattr__ = explains(__name__)
