"""`neuronx_distributed.kernels.ring_attention_kernel`: attention over a sequence that is cut over ranks."""

from nxd_neuronx.attention_kernels import nki_ring_attn_func
from nxd_neuronx.not_here import explains

__all__ = ["nki_ring_attn_func"]
__getattr__ = explains(__name__)
