"""`neuronx_distributed.kernels.flash_attn`: attention, by nxd_layers."""

from nxd_neuronx.attention import nki_flash_attn_func

__all__ = ["nki_flash_attn_func"]
