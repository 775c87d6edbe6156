"""`neuronx_distributed.modules.moe`: mixture-of-experts layers, from nxd_layers."""

from neuronx_distributed.modules.moe import (
    blockwise,
    expert_mlps,
    expert_mlps_v2,
    loss_function,
    model,
    model_utils,
    moe_config_validator,
    moe_configs,
    moe_fused_tkg,
    moe_fused_tkg_mx,
    moe_parallel_layers,
    moe_process_group,
    nki_import,
    routing,
    shared_experts,
    token_shuffling,
)
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.loss_function import load_balancing_loss_func
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.model_utils import ACT2FN
from neuronx_distributed.modules.moe.routing import RouterSinkhorn, RouterTopK

__all__ = [
    "blockwise",
    "expert_mlps",
    "expert_mlps_v2",
    "loss_function",
    "model",
    "model_utils",
    "moe_config_validator",
    "moe_configs",
    "moe_fused_tkg",
    "moe_fused_tkg_mx",
    "moe_parallel_layers",
    "moe_process_group",
    "nki_import",
    "routing",
    "shared_experts",
    "token_shuffling",
    "ACT2FN",
    "ExpertMLPs",
    "MoE",
    "RouterSinkhorn",
    "RouterTopK",
    "load_balancing_loss_func",
]
