"""Dispatch of tokens to the ranks that have their experts, and the sum of what these compute.

Dropless: every token reaches all of its experts, however unequal they are loaded (Gale et al. 2022, "MegaBlocks").
A token travels to a rank once, though several of its experts may be there, and that rank sends one weighted sum back,
as in DeepSeek-AI 2024, "DeepSeek-V3": where tokens have more experts than there are ranks, that is as little as
gathering all tokens everywhere, and never more than sending a token to each of its experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from nxd_state import Group, active_group, all_to_all, all_to_all_v, has_dynamic_shapes
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nxd_layers.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


def expert_parallel_forward(
    compute: ComputeExperts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_experts: int,
    trains_experts: bool,
) -> Tensor:
    """The weighted sum of each token's experts, of which each rank has an equal part in their order.

    Called by all ranks of the expert-parallel group, with as many tokens as each has, also none. On the meta device,
    where nothing says where tokens go, as many go to each rank as an even choice of experts sends on average.

    Args:
        compute: the experts of this rank, called where there are tokens for them: of tokens `[rows, hidden]`, the
            index among the local experts `[rows, 1]` and its weight `[rows, 1]`, it makes `[rows, hidden]`.
        hidden_states: `[tokens, hidden]` of this rank.
        top_k_index: `[tokens, k]`, the experts of each token among those of all ranks. Entries outside of
            `0..num_experts - 1` mean no expert.
        top_k_weights: `[tokens, k]`, float.
        num_experts: of all ranks together.
        trains_experts: whether `compute` needs gradients for weights of its own; the same on all ranks.

    Returns:
        `[tokens, hidden]`, with the dtype of `hidden_states`.

    Raises:
        ValueError: the expert-parallel ranks do not divide the experts.
        NotImplementedError: on XLA and Neuron devices, or while torch compiles: where tokens go is not known then.
    """
    group = active_group("ep")
    if num_experts % group.size:
        raise ValueError(f"{group.size} ranks do not divide num_experts={num_experts}; use an expert degree that does")
    if not has_dynamic_shapes(hidden_states) or torch.compiler.is_compiling():
        raise NotImplementedError(
            "expert parallelism sends as many tokens as the routers decide, which a recorded graph cannot; use "
            "expert_parallel_size=1 there, where every expert is split over the tensor-parallel ranks"
        )
    find = _expected_routes if hidden_states.is_meta else _find_routes
    routes = find(top_k_index, num_experts // group.size, group)
    rows, weights = _Dispatch.apply(hidden_states, top_k_weights, routes)
    if len(rows):
        outputs = _sum_of_local_experts(compute, rows, weights, routes.experts)
    else:  # still a part of the graph: backward communicates here if it does on other ranks
        needs_grad = trains_experts and torch.is_grad_enabled()
        outputs = rows if rows.requires_grad else rows.detach().requires_grad_(needs_grad)
    combined: Tensor = _Combine.apply(outputs, routes, len(hidden_states))
    return combined


def dispatch_replicated_tokens(
    compute: ComputeExperts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_experts: int,
    trains_experts: bool,
) -> Tensor:
    """`expert_parallel_forward` of tokens that all tensor-parallel ranks have.

    Where these split each expert, every one of them sends all tokens, and the result is its part of a sum. Where they
    have other experts, each sends a share of the tokens, and the result is gathered.

    Args:
        compute: as for `expert_parallel_forward`, like the others.
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, k]`.
        top_k_weights: `[tokens, k]`.
        num_experts: of all ranks together.
        trains_experts: whether `compute` needs gradients for weights of its own.

    Returns:
        `[tokens, hidden]`.
    """
    forward = partial(expert_parallel_forward, compute, num_experts=num_experts, trains_experts=trains_experts)
    if not shares_tokens_out():
        return forward(hidden_states, top_k_index, top_k_weights)
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


@dataclass(frozen=True)
class _Routes:
    """Which tokens of this rank go where, and what came.

    Attributes:
        group: the ranks.
        tokens: `[sent]`, the tokens sent, rank by rank; of one rank each is there once at most.
        send_counts: tokens for each rank.
        receive_counts: tokens from each rank.
        experts: the local experts of the tokens received.
    """

    group: Group
    tokens: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    experts: "_LocalExperts"


@dataclass(frozen=True)
class _LocalExperts:
    """Pairs of a token received and a local expert of it.

    Attributes:
        rows: `[pairs]`, the token.
        slots: `[pairs]`, where among the token's k experts this one is.
        index: `[pairs]`, the expert among the local ones.
        places: `[pairs]`, which of its token's local experts it is, counted from 0.
        most: local experts of any token.
    """

    rows: Tensor
    slots: Tensor
    index: Tensor
    places: Tensor
    most: int


@torch.no_grad()
def _find_routes(top_k_index: Tensor, experts_per_rank: int, group: Group) -> _Routes:
    owners = top_k_index.div(experts_per_rank, rounding_mode="floor")
    nobody = (owners < 0) | (owners >= group.size)
    goes_to = owners.new_zeros(len(owners), group.size + 1, dtype=torch.bool)
    goes_to.scatter_(1, owners.masked_fill(nobody, group.size), True)
    by_rank = goes_to[:, : group.size].t()
    tokens = by_rank.nonzero()[:, 1]
    counts = by_rank.sum(dim=1)
    received = all_to_all(counts, group, split_dim=0, concat_dim=0)
    send_counts, receive_counts = torch.stack((counts, received)).tolist()  # the one wait for the device
    index = all_to_all_v(top_k_index[tokens], group, send_counts=send_counts, receive_counts=receive_counts)
    return _Routes(group, tokens, send_counts, receive_counts, _local_experts(index, experts_per_rank, group.rank))


def _expected_routes(top_k_index: Tensor, experts_per_rank: int, group: Group) -> _Routes:
    """Routes of tokens without values, of which all ranks have as many."""
    (tokens, top_k), ranks = top_k_index.shape, group.size
    elsewhere = math.comb(experts_per_rank * (ranks - 1), top_k) / math.comb(experts_per_rank * ranks, top_k)
    counts = [round(tokens * (1 - elsewhere))] * ranks
    made = top_k_index.new_zeros
    all_to_all_v(made(sum(counts), top_k), group, send_counts=counts, receive_counts=counts)
    rows, slots, local, places = (made(tokens * top_k) for _ in range(4))
    experts = _LocalExperts(rows, slots, local, places, most=min(top_k, experts_per_rank))
    return _Routes(group, made(sum(counts)), counts, counts, experts)


def _local_experts(index: Tensor, experts_per_rank: int, rank: int) -> _LocalExperts:
    local = index - rank * experts_per_rank
    is_here = (local >= 0) & (local < experts_per_rank)
    rows, slots = is_here.nonzero(as_tuple=True)
    numbers = is_here.cumsum(dim=1)
    most = int(numbers.max()) if len(rows) else 0
    return _LocalExperts(rows, slots, local[rows, slots], numbers[rows, slots] - 1, most)


def _sum_of_local_experts(compute: ComputeExperts, tokens: Tensor, weights: Tensor, local: _LocalExperts) -> Tensor:
    outputs = compute(tokens[local.rows], local.index.unsqueeze(1), weights[local.rows, local.slots].unsqueeze(1))
    # Not index_add, which adds in any order on some devices.
    apart = outputs.new_zeros(len(tokens) * local.most, outputs.shape[1])
    apart = apart.index_copy(0, local.rows * local.most + local.places, outputs)
    return apart.view(len(tokens), local.most, -1).sum(dim=1)


class _Dispatch(Function):
    """Tokens and weights to their ranks, in one node: the ranks' backward passes send both in one order."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weights: Tensor, routes: _Routes) -> tuple[Tensor, Tensor]:
        ctx.routes, ctx.tokens = routes, len(hidden_states)
        return _send(hidden_states, routes), _send(weights, routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_hidden: Tensor, of_weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_hidden, needs_weights, _ = ctx.needs_input_grad
        hidden = _collect(of_hidden, ctx.routes, ctx.tokens) if needs_hidden else None
        weights = _collect(of_weights, ctx.routes, ctx.tokens) if needs_weights else None
        return hidden, weights, None


class _Combine(Function):
    """What the ranks computed for each token, added up where the token came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: _Routes, tokens: int) -> Tensor:
        ctx.routes = routes
        return _collect(rows, routes, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _send(grad, ctx.routes), None, None


def _send(of_tokens: Tensor, routes: _Routes) -> Tensor:
    """`[tokens, n]` to `[received, n]`."""
    counts = {"send_counts": routes.send_counts, "receive_counts": routes.receive_counts}
    return all_to_all_v(of_tokens[routes.tokens], routes.group, **counts)


def _collect(rows: Tensor, routes: _Routes, tokens: int) -> Tensor:
    """`[received, n]` to `[tokens, n]`: the sum over the ranks, in their order."""
    counts = {"send_counts": routes.receive_counts, "receive_counts": routes.send_counts}
    returned = all_to_all_v(rows, routes.group, **counts)
    total = rows.new_zeros(tokens, rows.shape[1])
    of_ranks = zip(routes.tokens.split(routes.send_counts), returned.split(routes.send_counts), strict=True)
    for indices, part in of_ranks:  # each index once, so the order of additions is known on every device
        total.index_add_(0, indices, part)
    return total
