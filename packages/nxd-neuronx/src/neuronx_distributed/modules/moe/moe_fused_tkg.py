"""`neuronx_distributed.modules.moe.moe_fused_tkg`: the fused kernel for single tokens."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
