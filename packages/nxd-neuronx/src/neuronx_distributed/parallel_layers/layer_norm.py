"""`neuronx_distributed.parallel_layers.layer_norm`: the norm of nxd_layers that may be sequence parallel."""

from nxd_layers import LayerNorm

__all__ = ["LayerNorm"]
