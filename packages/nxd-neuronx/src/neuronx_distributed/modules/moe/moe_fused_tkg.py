"""`neuronx_distributed.modules.moe.moe_fused_tkg`: the fused kernel for single tokens."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
