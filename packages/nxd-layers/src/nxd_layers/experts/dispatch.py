"""Dispatch of tokens to the ranks that have their experts, and the weighted sum of the experts' outputs.

Dropless: every token reaches all of its experts, however unequally they are loaded (Gale et al. 2022, "MegaBlocks").
By all-to-all a token is sent to a rank once, even if several of its experts are there, and that rank sends one weighted
sum back, as in DeepSeek-AI 2024, "DeepSeek-V3": never more than sending a token to each of its experts, and never more
than by all-gather. By all-gather every rank gets all tokens, and sums are reduce-scattered: nothing is counted, sorted
or waited for, which pays where most tokens go to most ranks, and shapes are known beforehand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from nxd_state import (
    Group,
    active_group,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_v,
    has_whole_experts,
    reduce_scatter,
)
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nxd_layers.experts.local_experts import (
    ComputeExperts,
    LocalExperts,
    PairCounts,
    counts_of_ranks,
    expected_pairs,
    find_local_experts,
    needs_static_shapes,
    summed_counts,
)
from nxd_layers.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

Dispatcher = Literal["all_to_all", "all_gather"]


class TokenDispatch(Protocol):
    """How tokens are sent to the ranks of their experts, and the outputs of experts returned."""

    @property
    def experts(self) -> LocalExperts:
        """The local experts of the received tokens."""

    def send(self, of_tokens: Tensor) -> Tensor:
        """`[tokens, n]` to `[received, n]`."""

    def collect(self, rows: Tensor) -> Tensor:
        """`[received, n]` to `[tokens, n]`: the sum over the ranks, in their order."""


@dataclass(frozen=True)
class AllToAll:
    """Sends each token to the ranks that have its experts.

    Attributes:
        group: the ranks.
        num_tokens: number of tokens of this rank.
        tokens: `[sent]`, the tokens sent, rank by rank; each at most once per rank.
        send_counts: number of tokens for each rank.
        receive_counts: number of tokens from each rank.
        experts: see `TokenDispatch`.
    """

    group: Group
    num_tokens: int
    tokens: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    experts: LocalExperts

    def send(self, of_tokens: Tensor) -> Tensor:
        """See `TokenDispatch`."""
        counts = {"send_counts": self.send_counts, "receive_counts": self.receive_counts}
        return all_to_all_v(of_tokens[self.tokens], self.group, **counts)

    def collect(self, rows: Tensor) -> Tensor:
        """See `TokenDispatch`."""
        counts = {"send_counts": self.receive_counts, "receive_counts": self.send_counts}
        returned = all_to_all_v(rows, self.group, **counts)
        total = rows.new_zeros(self.num_tokens, rows.shape[1])
        of_ranks = zip(self.tokens.split(self.send_counts), returned.split(self.send_counts), strict=True)
        for indices, part in of_ranks:  # each index once, so the order of additions is known on every device
            total.index_add_(0, indices, part)
        return total


@dataclass(frozen=True)
class AllGather:
    """Sends all tokens to all ranks, padded to the same number on each rank.

    Attributes:
        group: the ranks.
        num_tokens: number of tokens of this rank.
        most: largest number of tokens of any rank.
        experts: see `TokenDispatch`.
    """

    group: Group
    num_tokens: int
    most: int
    experts: LocalExperts

    def send(self, of_tokens: Tensor) -> Tensor:
        """See `TokenDispatch`."""
        return _gathered(of_tokens, self.group, self.most)

    def collect(self, rows: Tensor) -> Tensor:
        """See `TokenDispatch`."""
        return reduce_scatter(rows, self.group, dim=0)[: self.num_tokens]


@dataclass(frozen=True)
class AllReduce:
    """For tokens that all ranks of the group have already: nothing is sent, and outputs are summed."""

    group: Group
    experts: LocalExperts

    def send(self, of_tokens: Tensor) -> Tensor:
        """See `TokenDispatch`."""
        return of_tokens.view_as(of_tokens)

    def collect(self, rows: Tensor) -> Tensor:
        """See `TokenDispatch`."""
        return all_reduce(rows, self.group)


def fraction_of_ranks(top_k: int, num_experts: int, ranks: int) -> float:
    """Return the fraction of the ranks that a token is sent to on average if all experts are equally likely."""
    if top_k >= num_experts:
        return 1.0
    elsewhere = math.comb(num_experts - num_experts // ranks, top_k) / math.comb(num_experts, top_k)
    return 1 - elsewhere


@torch.no_grad()
def begin_all_to_all_dispatch(top_k_index: Tensor, experts_per_rank: int, group: Group) -> Callable[[], AllToAll]:
    """Start the dispatch of tokens with experts `[tokens, k]`; on the meta device routing is assumed to be even.

    Returns:
        A function that waits for the counts of tokens, which are being exchanged, and returns the dispatch.
    """
    if top_k_index.is_meta:
        return partial(_expected_all_to_all, top_k_index, experts_per_rank, group)
    counts = counts_of_ranks(top_k_index, experts_per_rank, group.size)
    sent = summed_counts(counts)
    received = all_to_all(sent, group, split_dim=0, concat_dim=0, async_op=True)

    @torch.no_grad()
    def end() -> AllToAll:
        to_ranks, from_ranks = torch.stack((sent, received.wait())).tolist()  # the one wait for the device
        send_counts, receive_counts = [it[0] for it in to_ranks], [it[0] for it in from_ranks]
        tokens = (counts.t() > 0).nonzero_static(size=sum(send_counts))[:, 1]
        index = all_to_all_v(top_k_index[tokens], group, send_counts=send_counts, receive_counts=receive_counts)
        experts = find_local_experts(index, experts_per_rank, group, PairCounts.of(from_ranks))
        return AllToAll(group, len(top_k_index), tokens, send_counts, receive_counts, experts)

    return end


def _expected_all_to_all(top_k_index: Tensor, experts_per_rank: int, group: Group) -> AllToAll:
    """Return the dispatch of tokens without values, with the same number for each rank."""
    tokens, top_k = top_k_index.shape
    counts = [round(tokens * fraction_of_ranks(top_k, experts_per_rank * group.size, group.size))] * group.size
    made = top_k_index.new_zeros
    all_to_all_v(made(sum(counts), top_k), group, send_counts=counts, receive_counts=counts)
    experts = expected_pairs(top_k_index, tokens * top_k, experts_per_rank)
    return AllToAll(group, tokens, made(sum(counts)), counts, counts, experts)


@torch.no_grad()
def all_gather_dispatch(top_k_index: Tensor, experts_per_rank: int, group: Group) -> AllGather:
    """Return the dispatch of tokens with experts `[tokens, k]`; with static shapes all ranks have as many tokens."""
    own = most = len(top_k_index)
    counts = None
    if group.size > 1 and not (top_k_index.is_meta or needs_static_shapes(top_k_index)):
        sums = summed_counts(counts_of_ranks(top_k_index, experts_per_rank, group.size))
        sums[:, 0] = own
        of_ranks = all_gather(sums.unsqueeze(0), group, dim=0).tolist()  # the one wait for the device
        most = max(of_rank[0][0] for of_rank in of_ranks)
        counts = PairCounts.of(of_rank[group.rank] for of_rank in of_ranks)
    index = _gathered(top_k_index, group, most, fill=-1)
    return AllGather(group, own, most, find_local_experts(index, experts_per_rank, group, counts))


@torch.no_grad()
def replicated_dispatch(top_k_index: Tensor, experts_per_rank: int, group: Group) -> AllReduce:
    """Return the dispatch of tokens that all ranks have, with experts `[tokens, k]`."""
    return AllReduce(group, find_local_experts(top_k_index, experts_per_rank, group))


def _gathered(of_tokens: Tensor, group: Group, most: int, *, fill: int = 0) -> Tensor:
    missing = most - len(of_tokens)
    return all_gather(F.pad(of_tokens, (0, 0, 0, missing), value=fill) if missing else of_tokens, group, dim=0)


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
    """Return the weighted sum of each token's experts, which are distributed evenly over the ranks, in order.

    Called by all ranks of the expert-parallel group with any number of tokens; with static shapes (on XLA and Neuron
    devices, and while torch compiles) all ranks must have the same number. On the meta device routing is assumed to be
    even.

    Args:
        compute: the experts of this rank: maps tokens `[rows, hidden]`, local expert indices `[rows, 1]` and weights
            `[rows, 1]` to `[rows, hidden]`. It is only called if there are tokens. With static shapes it gets all
            tokens, with indices and weights `[rows, k]`, and returns the weighted sums; an index equal to the number of
            local experts means no expert (see `separate_slots`).
        hidden_states: `[tokens, hidden]` of this rank.
        top_k_index: `[tokens, k]`, the experts of each token among all experts. Entries outside of
            `0..num_experts - 1` mean no expert.
        top_k_weights: `[tokens, k]`, float.
        num_experts: number of experts on all ranks.
        trains_experts: whether the weights of `compute` need gradients; the same on all ranks.
        dispatcher: how tokens are sent; None: by all-gather with static shapes or if nearly all tokens go to all ranks,
            else by all-to-all. The sums are the same.
        meanwhile: a function for work that does not need the sums, such as shared experts; called while the ranks
            exchange the numbers of tokens, and not at all if nothing is exchanged.

    Returns:
        `[tokens, hidden]`, with the dtype of `hidden_states`.

    Raises:
        ValueError: the expert-parallel ranks do not divide the experts.
        NotImplementedError: all-to-all on XLA and Neuron devices, or while torch compiles.
    """
    group = active_group("ep")
    experts_per_rank = _experts_per_rank(num_experts, group.size)
    chosen = dispatcher or _choose_dispatcher(hidden_states, top_k_index.shape[1], num_experts, group.size)
    if chosen == "all_to_all" and needs_static_shapes(hidden_states):
        raise NotImplementedError(
            "all_to_all dispatch has data-dependent shapes, which a recorded graph does not support; use all_gather"
        )
    dispatch: TokenDispatch
    if chosen == "all_to_all":
        end = begin_all_to_all_dispatch(top_k_index, experts_per_rank, group)
        if meanwhile is not None:
            meanwhile()
        dispatch = end()
    else:
        dispatch = all_gather_dispatch(top_k_index, experts_per_rank, group)
    return _dispatch_and_combine(dispatch, compute, hidden_states, top_k_weights, trains_experts=trains_experts)


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
    """`expert_parallel_forward` for tokens that all tensor-parallel ranks have; the arguments are the same.

    If these ranks split each expert, every rank sends all tokens, and its result is its part of a sum. If they have
    different experts, each sends a share of the tokens, and the results are gathered. If they are exactly the
    expert-parallel ranks, each may instead compute its experts for all tokens, and the results are summed.
    """
    forward = partial(
        expert_parallel_forward,
        compute,
        num_experts=num_experts,
        trains_experts=trains_experts,
        dispatcher=dispatcher,
        meanwhile=meanwhile,
    )
    if not has_whole_experts():
        return forward(hidden_states, top_k_index, top_k_weights)
    group = active_group("ep")
    if group.ranks == active_group("tp").ranks:
        experts_per_rank = _experts_per_rank(num_experts, group.size)
        chosen = dispatcher or _choose_dispatcher(
            hidden_states, top_k_index.shape[1], num_experts, group.size, least_fraction=_LEAST_FRACTION_OF_REPLICATED
        )
        if chosen == "all_gather":
            dispatch = replicated_dispatch(top_k_index, experts_per_rank, group)
            return _dispatch_and_combine(dispatch, compute, hidden_states, top_k_weights, trains_experts=trains_experts)
    tokens = len(hidden_states)
    fill = -tokens % active_group("tp").size
    whole = (_padded(hidden_states, fill, 0), _padded(top_k_index, fill, -1), _padded(top_k_weights, fill, 0))
    part = forward(*(scatter_to_sequence_parallel_region(it, 0) for it in whole))
    return gather_from_sequence_parallel_region(part, 0, to_model_parallel=False)[:tokens]


def _padded(tensor: Tensor, rows: int, value: int) -> Tensor:
    return F.pad(tensor, (0, 0, 0, rows), value=value)


def _experts_per_rank(num_experts: int, ranks: int) -> int:
    if num_experts % ranks:
        raise ValueError(f"{ranks} ranks do not divide num_experts={num_experts}; use an expert degree that does")
    return num_experts // ranks


_LEAST_FRACTION = 0.95  # fraction of the ranks that a token goes to, above which an all-gather sends hardly more
_LEAST_FRACTION_OF_REPLICATED = 0.5  # above, an all-reduce sends no more than all-to-alls and the gathering after them


def _choose_dispatcher(
    hidden_states: Tensor, top_k: int, num_experts: int, ranks: int, *, least_fraction: float = _LEAST_FRACTION
) -> Dispatcher:
    if needs_static_shapes(hidden_states):
        return "all_gather"
    if hidden_states.is_meta:  # plans count the least that can be sent
        return "all_to_all"
    return "all_gather" if fraction_of_ranks(top_k, num_experts, ranks) >= least_fraction else "all_to_all"


def _dispatch_and_combine(
    dispatch: TokenDispatch, compute: ComputeExperts, hidden_states: Tensor, weights: Tensor, *, trains_experts: bool
) -> Tensor:
    """Send tokens and weights to the ranks of their experts, compute, and return the sums."""
    rows, of_rows = _Dispatch.apply(hidden_states, weights, dispatch)
    outputs = dispatch.experts.weighted_sum(compute, rows, of_rows)
    if outputs is None:  # still a part of the graph: backward communicates here if it does on other ranks
        needs_grad = (trains_experts or rows.requires_grad) and torch.is_grad_enabled()
        outputs = rows.masked_fill(rows.new_ones((), dtype=torch.bool), 0)
        outputs = outputs if outputs.requires_grad else outputs.requires_grad_(needs_grad)
    combined: Tensor = _Combine.apply(outputs, dispatch)
    return combined


class _Dispatch(Function):
    """Tokens and weights to their ranks, in one node: the ranks' backward passes send both in one order."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weights: Tensor, dispatch: TokenDispatch) -> tuple[Tensor, Tensor]:
        ctx.dispatch = dispatch
        return dispatch.send(hidden_states), dispatch.send(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_hidden: Tensor, of_weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_hidden, needs_weights, _ = ctx.needs_input_grad
        hidden = ctx.dispatch.collect(of_hidden) if needs_hidden else None
        weights = ctx.dispatch.collect(of_weights) if needs_weights else None
        return hidden, weights, None


class _Combine(Function):
    """Sums the ranks' outputs for each token on the token's own rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: TokenDispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.collect(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.dispatch.send(grad), None
