"""`neuronx_distributed.modules.moe`: mixture-of-experts layers, from nxd_layers."""

from neuronx_distributed.modules.moe import expert_mlps, loss_function, model, model_utils, routing
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.loss_function import load_balancing_loss_func
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.model_utils import ACT2FN
from neuronx_distributed.modules.moe.routing import RouterSinkhorn, RouterTopK

__all__ = [
    "expert_mlps",
    "loss_function",
    "model",
    "model_utils",
    "routing",
    "ACT2FN",
    "ExpertMLPs",
    "MoE",
    "RouterSinkhorn",
    "RouterTopK",
    "load_balancing_loss_func",
]
