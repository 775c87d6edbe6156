"""`neuronx_distributed.modules.qkv_linear_utils`: what the query, key and value projections learn."""

from nxd_neuronx.layers import (
    check_requires_grad,
    check_use_bias,
)

__all__ = [
    "check_requires_grad",
    "check_use_bias",
]
