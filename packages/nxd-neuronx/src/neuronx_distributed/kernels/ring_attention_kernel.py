"""`neuronx_distributed.kernels.ring_attention_kernel`: attention over a sequence that is split over ranks."""

from nxd_neuronx.attention import nki_ring_attn_func

__all__ = ["nki_ring_attn_func"]
