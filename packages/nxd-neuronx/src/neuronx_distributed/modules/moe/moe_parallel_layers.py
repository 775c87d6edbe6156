"""`neuronx_distributed.modules.moe.moe_parallel_layers`: linear layers of all experts at once, over nxd_layers."""

from nxd_neuronx.expert_linears import (
    ExpertFusedColumnParallelLinear,
    ExpertFusedLinear,
    ExpertFusedRowParallelLinear,
)
from nxd_neuronx.not_here import not_here

(ExpertFusedLinearWithAsyncCommunication,) = not_here(
    __name__,
    "experts",
    "ExpertFusedLinearWithAsyncCommunication",
)

__all__ = [
    "ExpertFusedColumnParallelLinear",
    "ExpertFusedLinear",
    "ExpertFusedRowParallelLinear",
    "ExpertFusedLinearWithAsyncCommunication",
]
