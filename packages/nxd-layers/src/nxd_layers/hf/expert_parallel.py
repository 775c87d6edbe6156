"""Expert parallelism for unmodified models of transformers.

The experts of a layer are parameters `[experts, ...]` of one module, whose forward takes tokens, the experts of each
and their weights. That forward computes this rank's experts as it computes all; routers stay as they are.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from nxd_state import active_group
from torch import Tensor, nn

from nxd_layers.experts import (
    Dispatcher,
    dispatch_replicated_tokens,
    needs_static_shapes,
    separate_slots,
    shard_experts,
    shares_tokens_out,
)
from nxd_layers.experts.parameters import check_expert_tensor_parallel_size
from nxd_layers.hf.layers import mark_partial_gradients
from nxd_layers.hf.plans import joined
from nxd_layers.hf.shared_experts import overlap_shared_experts
from nxd_layers.hf.static_shapes import knows_none

DISPATCH = "ep_dispatch_experts"  # the module
SPLIT_EXPERTS = "grouped_gemm"  # its parameters
STYLES = (DISPATCH, SPLIT_EXPERTS)

_INPUTS = 3  # tokens, experts, weights


def check_experts(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise a ValueError where experts cannot be split as a plan says.

    Args:
        model: the whole model.
        styles: of its experts, by path; see `STYLES`.
    """
    check_expert_tensor_parallel_size()
    for path, style in styles.items():
        parent = path.rpartition(".")[0]
        if style == SPLIT_EXPERTS and styles.get(parent) != DISPATCH:
            raise ValueError(f"{path} is {SPLIT_EXPERTS}, but {parent} is not {DISPATCH}; give it that style")
    for path in _modules(styles):
        experts = model.get_submodule(path)
        names = _split_parameters(path, experts, styles)
        if not names:
            raise ValueError(f"{path} is {DISPATCH}, but none of its parameters is {SPLIT_EXPERTS}")
        numbers = {experts.get_parameter(name).shape[0] for name in names}
        if len(numbers) > 1:
            raise ValueError(f"the parameters of {path} have {sorted(numbers)} experts, where all must have as many")
        number, size = numbers.pop(), active_group("ep").size
        if number % size:
            raise ValueError(f"{path} has {number} experts, which {size} expert-parallel ranks do not divide")
        left = [name for name, it in experts.named_parameters() if name not in names and it.shape[:1] == (number,)]
        if left:
            raise ValueError(
                f"{joined(path, left[0])} has a row for each of {number} experts; give it the style {SPLIT_EXPERTS}"
            )
        if len(inspect.signature(experts.forward).parameters) != _INPUTS:
            raise ValueError(
                f"{path} is a {type(experts).__name__}, whose forward does not take tokens, their experts and weights"
            )


def split_experts(model: nn.Module, styles: Mapping[str, str], dispatcher: Dispatcher | None) -> None:
    """Keep this rank's experts, and have tokens travel to theirs.

    Args:
        model: whose experts are whole, or split over the tensor-parallel ranks where these split each expert.
        styles: as for `check_experts`.
        dispatcher: how they travel, as for `nxd_layers.experts.expert_parallel_forward`.
    """
    for path in _modules(styles):
        experts: Any = model.get_submodule(path)
        names = _split_parameters(path, experts, styles)
        number = experts.get_parameter(names[0]).shape[0]
        for name in names:
            experts.register_parameter(name, shard_experts(experts.get_parameter(name)))
        # What else there is, each rank applies to the tokens of its own experts.
        others = [it for name, it in experts.named_parameters() if name not in names]
        if shares_tokens_out():
            mark_partial_gradients(others)
        if hasattr(experts, "num_experts"):
            experts.num_experts = number // active_group("ep").size
        parent, _, name = path.rpartition(".")
        early = overlap_shared_experts(model.get_submodule(parent), name)
        experts.forward = partial(_forward, experts, number, dispatcher, early)


def _modules(styles: Mapping[str, str]) -> list[str]:
    return [path for path, style in styles.items() if style == DISPATCH]


def _split_parameters(path: str, experts: nn.Module, styles: Mapping[str, str]) -> list[str]:
    return [name for name, _ in experts.named_parameters() if styles.get(joined(path, name)) == SPLIT_EXPERTS]


@cache
def _signature_of(forward: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(forward)


def _forward(
    experts: Any,
    number: int,
    dispatcher: Dispatcher | None,
    early: Callable[[], None] | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    given = _signature_of(type(experts).forward).bind(experts, *args, **kwargs)
    _, hidden_states, top_k_index, top_k_weights = given.arguments.values()
    return dispatch_replicated_tokens(
        partial(_compute, experts, number // active_group("ep").size),
        hidden_states,
        top_k_index,
        top_k_weights,
        num_experts=number,
        trains_experts=any(it.requires_grad for it in experts.parameters()),
        dispatcher=dispatcher,
        meanwhile=early,
    )


def _compute(experts: Any, number: int, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """This rank's experts, which may be given all of the experts of each token (see `expert_parallel_forward`)."""
    if needs_static_shapes(tokens) and not knows_none(experts):
        rows = type(experts).forward(experts, *separate_slots(tokens, index, weights, number))
        return rows.view(*index.shape, -1).sum(dim=1)
    return type(experts).forward(experts, tokens, index, weights)
