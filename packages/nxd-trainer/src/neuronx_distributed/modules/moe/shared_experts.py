"""`neuronx_distributed.modules.moe.shared_experts`: experts that take every token, over nxd_layers."""

from nxd_trainer.compat.experts import SharedExperts
from nxd_trainer.compat.not_here import not_here

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
