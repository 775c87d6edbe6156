"""`neuronx_distributed.kernels.ring_attention_kernel`: attention over a sequence that is cut over ranks."""

from nxd_neuronx.attention_kernels import get_seq_tile_size, nki_ring_attn_func
from nxd_neuronx.not_here import not_here

(NkiRingAttnFunc,) = not_here(__name__, "kernel of a sequence", "NkiRingAttnFunc")

__all__ = ["get_seq_tile_size", "NkiRingAttnFunc", "nki_ring_attn_func"]
