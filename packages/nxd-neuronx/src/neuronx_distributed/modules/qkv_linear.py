"""`neuronx_distributed.modules.qkv_linear`: the query, key and value projections from nxd_layers."""

from nxd_neuronx.layers import GQAQKVColumnParallelLinear

__all__ = ["GQAQKVColumnParallelLinear"]
