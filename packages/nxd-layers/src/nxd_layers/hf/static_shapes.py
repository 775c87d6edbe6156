"""Models of transformers in static shapes, which devices that record graphs need (XLA, Neuron)."""

from typing import Any

import torch
from nxd_state import has_dynamic_shapes, is_transformers_model
from torch import Tensor, nn

from nxd_layers.experts import rows_of_experts, weights_of_experts
from nxd_layers.hf.transformers_models import look_for_documents_by, register_experts

_EVERY_EXPERT = "nxd_every_expert"
_DYNAMIC_IMPLEMENTATIONS = ("eager", "grouped_mm")


def use_static_shapes(model: nn.Module) -> None:
    """Have a model compute in static shapes if the device of this process needs that (XLA, Neuron).

    Of the implementations of experts in transformers, "eager" and "grouped_mm" read how many tokens an expert has, and
    "batched_mm" copies an expert's weights for each token. Here each expert computes all tokens, so that the outputs
    take `experts * tokens` rows. Experts whose config names another implementation keep it. From then on, the masks of
    all models are made without a look at whether rows hold several documents.

    Args:
        model: a model; only those of transformers are changed.
    """
    if has_dynamic_shapes() or not is_transformers_model(model):
        return
    look_for_documents_by(_documents)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "is_transposed") and _implementation_of(config) in _DYNAMIC_IMPLEMENTATIONS:
            register_experts(_EVERY_EXPERT, _every_expert)
            config._experts_implementation = _EVERY_EXPERT


def runs_every_expert(experts: nn.Module) -> bool:
    """Return whether a module of experts computes all tokens with each expert, as `use_static_shapes` makes it do."""
    return _implementation_of(getattr(experts, "config", None)) == _EVERY_EXPERT


def _implementation_of(config: Any) -> str | None:
    return getattr(config, "_experts_implementation", None)


def _documents(position_ids: Tensor) -> Tensor:
    """Return the number of each position's document in its row, `[batch, seq]`, even if each row is one document."""
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=1) != 1
    return begins.cumsum(dim=1)


def _every_expert(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, `[tokens, hidden]`.

    Args:
        experts: the module, with weights `[experts, out, in]`, or transposed.
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, k]`; the number of experts stands for none.
        top_k_weights: `[tokens, k]`.
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
    """Multiply `[tokens, in]` or `[experts, tokens, in]` by each expert's weight: `[experts, tokens, out]`."""
    weight: Tensor = getattr(experts, name)
    products = rows @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return products + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else products
