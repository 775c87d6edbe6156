"""Mixtures of experts: layers of them, and tokens that travel to the ranks of their experts and back."""

from nxd_layers.experts.balance import load_balancing_loss
from nxd_layers.experts.dispatch import Dispatcher, dispatch_replicated_tokens, expert_parallel_forward
from nxd_layers.experts.linear import ExpertLinear, shard_expert_parameter
from nxd_layers.experts.local_experts import needs_static_shapes, rows_of_experts, separate_slots, weights_of_experts
from nxd_layers.experts.mlps import ACTIVATIONS, ExpertMLPs, MoE
from nxd_layers.experts.router_balance import BalanceConfig, RouterBalance, RouterLayer, RouterStatistics
from nxd_layers.experts.routers import GroupLimitedRouter, RouterBase, RouterSinkhorn, RouterTopK

__all__ = [
    "MoE",
    "ExpertLinear",
    "ExpertMLPs",
    "ACTIVATIONS",
    "RouterBase",
    "RouterTopK",
    "GroupLimitedRouter",
    "RouterSinkhorn",
    "load_balancing_loss",
    "RouterBalance",
    "BalanceConfig",
    "RouterLayer",
    "RouterStatistics",
    "Dispatcher",
    "expert_parallel_forward",
    "dispatch_replicated_tokens",
    "needs_static_shapes",
    "rows_of_experts",
    "separate_slots",
    "weights_of_experts",
    "shard_expert_parameter",
]
