"""`neuronx_distributed.kernels.flash_attn`: attention, by nxd_layers."""

from nxd_neuronx.attention_kernels import nki_flash_attn_func
from nxd_neuronx.not_here import explains

__all__ = ["nki_flash_attn_func"]
__getattr__ = explains(__name__)
