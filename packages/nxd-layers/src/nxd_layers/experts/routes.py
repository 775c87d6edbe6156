"""Ways of tokens to the ranks of their experts, and of what these compute back.

By all-to-all a token travels to a rank once, though several of its experts may be there, and that rank sends one
weighted sum back, as in DeepSeek-AI 2024, "DeepSeek-V3": never more than sending a token to each of its experts, and
never more than by all-gather. By all-gather every rank gets all tokens, and sums are reduce-scattered: nothing is
counted, sorted or waited for, which is worth it where most tokens go to most ranks, and shapes are known beforehand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from nxd_state import Group, all_gather, all_reduce, all_to_all, all_to_all_v, reduce_scatter
from torch import Tensor
from torch.nn import functional as F

from nxd_layers.experts.local_experts import (
    LocalExperts,
    expected_pairs,
    find_local_experts,
    needs_static_shapes,
)

Dispatcher = Literal["all_to_all", "all_gather"]


class Routes(Protocol):
    """Where the tokens of this rank go, and which came."""

    @property
    def experts(self) -> LocalExperts:
        """The local experts of the tokens that came."""

    def send(self, of_tokens: Tensor) -> Tensor:
        """`[tokens, n]` to `[received, n]`."""

    def collect(self, rows: Tensor) -> Tensor:
        """`[received, n]` to `[tokens, n]`: the sum over the ranks, in their order."""


@dataclass(frozen=True)
class AllToAll:
    """Each token to the ranks that have experts of its own.

    Attributes:
        group: the ranks.
        num_tokens: of this rank.
        tokens: `[sent]`, the tokens sent, rank by rank; of one rank each is there once at most.
        send_counts: tokens for each rank.
        receive_counts: tokens from each rank.
        experts: see `Routes`.
    """

    group: Group
    num_tokens: int
    tokens: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    experts: LocalExperts

    def send(self, of_tokens: Tensor) -> Tensor:
        """See `Routes`."""
        counts = {"send_counts": self.send_counts, "receive_counts": self.receive_counts}
        return all_to_all_v(of_tokens[self.tokens], self.group, **counts)

    def collect(self, rows: Tensor) -> Tensor:
        """See `Routes`."""
        counts = {"send_counts": self.receive_counts, "receive_counts": self.send_counts}
        returned = all_to_all_v(rows, self.group, **counts)
        total = rows.new_zeros(self.num_tokens, rows.shape[1])
        of_ranks = zip(self.tokens.split(self.send_counts), returned.split(self.send_counts), strict=True)
        for indices, part in of_ranks:  # each index once, so the order of additions is known on every device
            total.index_add_(0, indices, part)
        return total


@dataclass(frozen=True)
class AllGather:
    """All tokens to all ranks, those of each filled up to as many.

    Attributes:
        group: the ranks.
        num_tokens: of this rank.
        most: of any rank.
        experts: see `Routes`.
    """

    group: Group
    num_tokens: int
    most: int
    experts: LocalExperts

    def send(self, of_tokens: Tensor) -> Tensor:
        """See `Routes`."""
        return _gathered(of_tokens, self.group, self.most)

    def collect(self, rows: Tensor) -> Tensor:
        """See `Routes`."""
        return reduce_scatter(rows, self.group, dim=0)[: self.num_tokens]


@dataclass(frozen=True)
class AllReduce:
    """Tokens that all ranks have already.

    Attributes:
        group: the ranks.
        experts: see `Routes`.
    """

    group: Group
    experts: LocalExperts

    def send(self, of_tokens: Tensor) -> Tensor:
        """See `Routes`."""
        return of_tokens.view_as(of_tokens)

    def collect(self, rows: Tensor) -> Tensor:
        """See `Routes`."""
        return all_reduce(rows, self.group)


def share_of_ranks(top_k: int, num_experts: int, ranks: int) -> float:
    """How many of the ranks a token goes to on average, as a part of them, where all experts are chosen alike."""
    if top_k >= num_experts:
        return 1.0
    elsewhere = math.comb(num_experts - num_experts // ranks, top_k) / math.comb(num_experts, top_k)
    return 1 - elsewhere


@torch.no_grad()
def begin_routes_by_all_to_all(top_k_index: Tensor, experts_per_rank: int, group: Group) -> Callable[[], AllToAll]:
    """Of tokens and their experts, `[tokens, k]`; on the meta device those of an even choice.

    Counts of tokens are on their way then. What is returned waits for them, and makes the routes.
    """
    if top_k_index.is_meta:
        return partial(_expected_routes, top_k_index, experts_per_rank, group)
    owners = top_k_index.div(experts_per_rank, rounding_mode="floor")
    nobody = (owners < 0) | (owners >= group.size)
    goes_to = owners.new_zeros(len(owners), group.size + 1, dtype=torch.bool)
    goes_to.scatter_(1, owners.masked_fill(nobody, group.size), True)
    by_rank = goes_to[:, : group.size].t()
    tokens = by_rank.nonzero()[:, 1]
    counts = by_rank.sum(dim=1)
    received = all_to_all(counts, group, split_dim=0, concat_dim=0, async_op=True)

    @torch.no_grad()
    def end() -> AllToAll:
        send_counts, receive_counts = torch.stack((counts, received.wait())).tolist()  # the one wait for the device
        index = all_to_all_v(top_k_index[tokens], group, send_counts=send_counts, receive_counts=receive_counts)
        experts = find_local_experts(index, experts_per_rank, group)
        return AllToAll(group, len(top_k_index), tokens, send_counts, receive_counts, experts)

    return end


def _expected_routes(top_k_index: Tensor, experts_per_rank: int, group: Group) -> AllToAll:
    """Routes of tokens without values, of which all ranks have as many."""
    tokens, top_k = top_k_index.shape
    counts = [round(tokens * share_of_ranks(top_k, experts_per_rank * group.size, group.size))] * group.size
    made = top_k_index.new_zeros
    all_to_all_v(made(sum(counts), top_k), group, send_counts=counts, receive_counts=counts)
    experts = expected_pairs(top_k_index, tokens * top_k, experts_per_rank)
    return AllToAll(group, tokens, made(sum(counts)), counts, counts, experts)


@torch.no_grad()
def routes_by_all_gather(top_k_index: Tensor, experts_per_rank: int, group: Group) -> AllGather:
    """Of tokens and their experts, `[tokens, k]`; where shapes are static, all ranks have as many tokens."""
    own = most = len(top_k_index)
    if group.size > 1 and not (top_k_index.is_meta or needs_static_shapes(top_k_index)):
        most = int(all_gather(torch.tensor([own], device=top_k_index.device), group, dim=0).max())
    index = _gathered(top_k_index, group, most, fill=-1)
    return AllGather(group, own, most, find_local_experts(index, experts_per_rank, group))


@torch.no_grad()
def routes_of_replicated(top_k_index: Tensor, experts_per_rank: int, group: Group) -> AllReduce:
    """Of tokens that all ranks have, and their experts, `[tokens, k]`."""
    return AllReduce(group, find_local_experts(top_k_index, experts_per_rank, group))


def _gathered(of_tokens: Tensor, group: Group, most: int, *, fill: int = 0) -> Tensor:
    missing = most - len(of_tokens)
    return all_gather(F.pad(of_tokens, (0, 0, 0, missing), value=fill) if missing else of_tokens, group, dim=0)
