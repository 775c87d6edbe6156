"""`neuronx_distributed.kernels.flash_attn`: attention, by nxd_layers."""

from nxd_neuronx.attention_kernels import nki_flash_attn_func
from nxd_neuronx.not_here import not_here

(
    NKIAttnFunc,
    get_flash_attn_kernels,
) = not_here(__name__, "nki", "NKIAttnFunc", "get_flash_attn_kernels")

__all__ = ["nki_flash_attn_func", "NKIAttnFunc", "get_flash_attn_kernels"]
