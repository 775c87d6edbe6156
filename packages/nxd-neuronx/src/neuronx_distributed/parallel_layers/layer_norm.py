"""`neuronx_distributed.parallel_layers.layer_norm`: the layer norm of nxd_layers, with sequence parallelism."""

from nxd_layers import LayerNorm

__all__ = ["LayerNorm"]
