"""Dispatch of tokens to the ranks that have their experts, and the sum of what these compute.

Dropless: every token reaches all of its experts, however unequal they are loaded (Gale et al. 2022, "MegaBlocks").
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from nxd_state import active_group
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nxd_layers.experts.local_experts import ComputeExperts, needs_static_shapes
from nxd_layers.experts.routes import (
    Dispatcher,
    Routes,
    begin_routes_by_all_to_all,
    routes_by_all_gather,
    routes_of_replicated,
    share_of_ranks,
)
from nxd_layers.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region


def expert_parallel_forward(
    compute: ComputeExperts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_experts: int,
    trains_experts: bool,
    dispatcher: Dispatcher | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """The weighted sum of each token's experts, of which each rank has an equal part in their order.

    Called by all ranks of the expert-parallel group, with as many tokens as each has, also none; where shapes must be
    static (on XLA and Neuron devices, and while torch compiles) all have as many. On the meta device, where nothing
    says where tokens go, as many go to each rank as an even choice of experts sends on average.

    Args:
        compute: the experts of this rank, called where there are tokens for them: of tokens `[rows, hidden]`, the
            index among the local experts `[rows, 1]` and its weight `[rows, 1]`, it makes `[rows, hidden]`. Where
            shapes must be static it is given all tokens, with index and weights `[rows, k]`, of which it makes the
            weighted sum; the number of local experts stands for none among the indices (see `separate_slots`).
        hidden_states: `[tokens, hidden]` of this rank.
        top_k_index: `[tokens, k]`, the experts of each token among those of all ranks. Entries outside of
            `0..num_experts - 1` mean no expert.
        top_k_weights: `[tokens, k]`, float.
        num_experts: of all ranks together.
        trains_experts: whether `compute` needs gradients for weights of its own; the same on all ranks.
        dispatcher: how tokens travel; if None by all-gather where shapes must be static or nearly all tokens go to all
            ranks, by all-to-all elsewhere. The sums are the same.
        meanwhile: computes what does not need the sum, such as shared experts; it is called while the ranks tell each
            other how many tokens will come, and not at all where nothing is told.

    Returns:
        `[tokens, hidden]`, with the dtype of `hidden_states`.

    Raises:
        ValueError: the expert-parallel ranks do not divide the experts.
        NotImplementedError: all-to-all on XLA and Neuron devices, or while torch compiles: where tokens go is not
            known then.
    """
    group = active_group("ep")
    experts_per_rank = _experts_per_rank(num_experts, group.size)
    chosen = dispatcher or _cheapest(hidden_states, top_k_index.shape[1], num_experts, group.size)
    if chosen == "all_to_all" and needs_static_shapes(hidden_states):
        raise NotImplementedError(
            "dispatch by all_to_all sends as many tokens as the routers decide, which a recorded graph cannot; use "
            "all_gather there"
        )
    routes: Routes
    if chosen == "all_to_all":
        end = begin_routes_by_all_to_all(top_k_index, experts_per_rank, group)
        if meanwhile is not None:
            meanwhile()
        routes = end()
    else:
        routes = routes_by_all_gather(top_k_index, experts_per_rank, group)
    return _through(routes, compute, hidden_states, top_k_weights, trains_experts=trains_experts)


def dispatch_replicated_tokens(
    compute: ComputeExperts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_experts: int,
    trains_experts: bool,
    dispatcher: Dispatcher | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """`expert_parallel_forward` of tokens that all tensor-parallel ranks have.

    Where these split each expert, every one of them sends all tokens, and the result is its part of a sum. Where they
    have other experts, each sends a share of the tokens, and the result is gathered; or, where they are just the ranks
    of the experts, each computes its own for all tokens, and the results are summed: that is the all-gather of what is
    everywhere already.

    Args:
        compute: as for `expert_parallel_forward`, like the others.
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, k]`.
        top_k_weights: `[tokens, k]`.
        num_experts: of all ranks together.
        trains_experts: whether `compute` needs gradients for weights of its own.
        dispatcher: how tokens travel.
        meanwhile: computes something else while counts are on their way.

    Returns:
        `[tokens, hidden]`.
    """
    forward = partial(
        expert_parallel_forward,
        compute,
        num_experts=num_experts,
        trains_experts=trains_experts,
        dispatcher=dispatcher,
        meanwhile=meanwhile,
    )
    if not shares_tokens_out():
        return forward(hidden_states, top_k_index, top_k_weights)
    group = active_group("ep")
    if group.ranks == active_group("tp").ranks:
        experts_per_rank = _experts_per_rank(num_experts, group.size)
        chosen = dispatcher or _cheapest(
            hidden_states, top_k_index.shape[1], num_experts, group.size, least_share=_LEAST_SHARE_OF_REPLICATED
        )
        if chosen == "all_gather":
            routes = routes_of_replicated(top_k_index, experts_per_rank, group)
            return _through(routes, compute, hidden_states, top_k_weights, trains_experts=trains_experts)
    tokens = len(hidden_states)
    fill = -tokens % active_group("tp").size
    whole = (_padded(hidden_states, fill, 0), _padded(top_k_index, fill, -1), _padded(top_k_weights, fill, 0))
    part = forward(*(scatter_to_sequence_parallel_region(it, 0) for it in whole))
    return gather_from_sequence_parallel_region(part, 0, to_model_parallel=False)[:tokens]


def shares_tokens_out() -> bool:
    """Whether tensor-parallel ranks have other experts, and so send a share of their tokens each."""
    return active_group("etp").size < active_group("tp").size


def _padded(tensor: Tensor, rows: int, value: int) -> Tensor:
    return F.pad(tensor, (0, 0, 0, rows), value=value)


def _experts_per_rank(num_experts: int, ranks: int) -> int:
    if num_experts % ranks:
        raise ValueError(f"{ranks} ranks do not divide num_experts={num_experts}; use an expert degree that does")
    return num_experts // ranks


_LEAST_SHARE = 0.95  # of the ranks that a token goes to, from which on gathering all tokens sends hardly more
_LEAST_SHARE_OF_REPLICATED = 0.5  # from here on an all-reduce sends no more than all-to-alls and the gathering after


def _cheapest(
    hidden_states: Tensor, top_k: int, num_experts: int, ranks: int, *, least_share: float = _LEAST_SHARE
) -> Dispatcher:
    if needs_static_shapes(hidden_states):
        return "all_gather"
    if hidden_states.is_meta:  # what is planned is the least that can be sent
        return "all_to_all"
    return "all_gather" if share_of_ranks(top_k, num_experts, ranks) >= least_share else "all_to_all"


def _through(
    routes: Routes, compute: ComputeExperts, hidden_states: Tensor, weights: Tensor, *, trains_experts: bool
) -> Tensor:
    """Send tokens and weights, compute, and collect the sums."""
    rows, of_rows = _Dispatch.apply(hidden_states, weights, routes)
    outputs = routes.experts.weighted_sum(compute, rows, of_rows)
    if outputs is None:  # still a part of the graph: backward communicates here if it does on other ranks
        needs_grad = (trains_experts or rows.requires_grad) and torch.is_grad_enabled()
        outputs = rows.masked_fill(rows.new_ones((), dtype=torch.bool), 0)
        outputs = outputs if outputs.requires_grad else outputs.requires_grad_(needs_grad)
    combined: Tensor = _Combine.apply(outputs, routes)
    return combined


class _Dispatch(Function):
    """Tokens and weights to their ranks, in one node: the ranks' backward passes send both in one order."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weights: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        ctx.routes = routes
        return routes.send(hidden_states), routes.send(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_hidden: Tensor, of_weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_hidden, needs_weights, _ = ctx.needs_input_grad
        hidden = ctx.routes.collect(of_hidden) if needs_hidden else None
        weights = ctx.routes.collect(of_weights) if needs_weights else None
        return hidden, weights, None


class _Combine(Function):
    """What the ranks computed for each token, added up where the token came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.collect(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.send(grad), None
