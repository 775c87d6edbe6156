"""`neuronx_distributed.modules.qkv_linear`: the query, key and value projections from nxd_layers."""

from nxd_layers.qkv_linear import (
    GQAQKVColumnParallelLinear,
)
from nxd_neuronx.layers import (
    GQAQKVLinearWithAsyncCommunication,
    gqa_qkv_linear_with_async_allreduce,
)

__all__ = [
    "GQAQKVColumnParallelLinear",
    "GQAQKVLinearWithAsyncCommunication",
    "gqa_qkv_linear_with_async_allreduce",
]
