"""`neuronx_distributed.kernels.ring_attention_kernel`: comes with context parallelism."""

from nxd_trainer.compat.attention_kernels import get_seq_tile_size
from nxd_trainer.compat.not_here import not_here

(
    NkiRingAttnFunc,
    nki_ring_attn_func,
) = not_here(__name__, "context", "NkiRingAttnFunc", "nki_ring_attn_func")

__all__ = ["get_seq_tile_size", "NkiRingAttnFunc", "nki_ring_attn_func"]
