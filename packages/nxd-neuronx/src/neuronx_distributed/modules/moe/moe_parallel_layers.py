"""`neuronx_distributed.modules.moe.moe_parallel_layers`: linear layers of all experts at once, over nxd_layers."""

from nxd_neuronx.expert_linears import ExpertFusedColumnParallelLinear, ExpertFusedLinear, ExpertFusedRowParallelLinear
from nxd_neuronx.unsupported import explains

__all__ = ["ExpertFusedColumnParallelLinear", "ExpertFusedLinear", "ExpertFusedRowParallelLinear"]
__getattr__ = explains(__name__)
