"""`neuronx_distributed.modules.moe.moe_fused_tkg_mx`: the fused kernel for single tokens, with microscaled weights."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
