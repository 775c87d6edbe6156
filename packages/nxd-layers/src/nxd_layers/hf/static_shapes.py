"""Models of transformers where no shape may depend on values: XLA and Neuron devices.

Of the ways in which transformers computes experts, "eager" and "grouped_mm" look how many tokens an expert has, and
"batched_mm" copies an expert's weights for each token. Here each computes for all tokens, so that its results take
`experts * tokens` rows. And masks are made without a look whether rows hold several documents.
"""

from typing import Any

import torch
from nxd_state import has_dynamic_shapes
from torch import Tensor, nn

from nxd_layers.experts import rows_of_experts, weights_of_experts
from nxd_layers.hf.transformers_models import is_transformers_model, look_for_documents_by, register_experts

EVERY_EXPERT = "nxd_every_expert"
_OF_DYNAMIC_SHAPES = ("eager", "grouped_mm")


def use_static_shapes(model: nn.Module) -> None:
    """Have a model compute in fixed shapes where the device of this process needs that; elsewhere nothing happens.

    Experts whose config names another way of fixed shapes keep it. Masks of all models are made so from then on.

    Args:
        model: of transformers; others are left alone.
    """
    if has_dynamic_shapes() or not is_transformers_model(model):
        return
    look_for_documents_by(_documents)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "is_transposed") and _way_of(config) in _OF_DYNAMIC_SHAPES:
            register_experts(EVERY_EXPERT, _every_expert)
            config._experts_implementation = EVERY_EXPERT


def knows_none(experts: nn.Module) -> bool:
    """Whether it takes all k experts of each token, of which some may be none."""
    return _way_of(getattr(experts, "config", None)) == EVERY_EXPERT


def _way_of(config: Any) -> str | None:
    return getattr(config, "_experts_implementation", None)


def _documents(position_ids: Tensor) -> Tensor:
    """The number of each position's document in its row, `[batch, seq]`; also where each row is one document."""
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=1) != 1
    return begins.cumsum(dim=1)


def _every_expert(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts.

    Args:
        experts: with weights `[experts, out, in]`, or transposed.
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, k]`; the number of experts stands for none.
        top_k_weights: `[tokens, k]`.

    Returns:
        `[tokens, hidden]`.
    """
    weights = weights_of_experts(top_k_index, top_k_weights, len(experts.down_proj))
    rows = rows_of_experts(hidden_states, weights)
    inner = _products(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = _products(experts, "down_proj", inner)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    return (outputs * weights.t().unsqueeze(-1)).sum(dim=0).to(hidden_states.dtype)


def _products(experts: Any, name: str, rows: Tensor) -> Tensor:
    """`[tokens, in]`, or `[experts, tokens, in]`, times the weight of each expert: `[experts, tokens, out]`."""
    weight: Tensor = getattr(experts, name)
    products = rows @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return products + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else products
