"""`neuronx_distributed.parallel_layers.layers`: the layers of nxd_layers."""

from nxd_layers import ColumnParallelLinear, LayerNorm, ParallelEmbedding, RMSNorm, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding", "LayerNorm", "RMSNorm"]
