"""`neuronx_distributed.kernels`: attention, computed by torch."""

from neuronx_distributed.kernels import flash_attn, kernel_utils, ring_attention_kernel
from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
from neuronx_distributed.kernels.ring_attention_kernel import nki_ring_attn_func

__all__ = ["flash_attn", "kernel_utils", "ring_attention_kernel", "nki_flash_attn_func", "nki_ring_attn_func"]
