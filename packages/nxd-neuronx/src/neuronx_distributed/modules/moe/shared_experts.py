"""`neuronx_distributed.modules.moe.shared_experts`: experts that take every token, over nxd_layers."""

from nxd_neuronx.experts import SharedExperts
from nxd_neuronx.not_here import not_here

(
    ColumnParallelLinearTransposed,
    RowParallelLinearTransposed,
) = not_here(
    __name__,
    "experts",
    "ColumnParallelLinearTransposed",
    "RowParallelLinearTransposed",
)

__all__ = [
    "SharedExperts",
    "ColumnParallelLinearTransposed",
    "RowParallelLinearTransposed",
]
