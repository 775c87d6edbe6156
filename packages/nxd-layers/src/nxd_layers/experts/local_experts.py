"""The experts of this rank among the tokens' experts, and the weighted sum of their outputs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from nxd_state import Group, has_dynamic_shapes
from torch import Tensor

ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


def needs_static_shapes(tensor: Tensor) -> bool:
    """Whether shapes may not depend on values: on XLA and Neuron devices, and while torch compiles or exports."""
    return torch.compiler.is_compiling() or not has_dynamic_shapes(tensor)


@dataclass(frozen=True)
class Pairs:
    """All pairs of a token and one of its local experts.

    Attributes:
        rows: `[pairs]`, the token.
        slots: `[pairs]`, the expert's place among the token's k experts.
        index: `[pairs]`, the index among the local experts.
        places: `[pairs]`, the expert's place among the token's local experts, counted from 0.
        most: at least the largest number of local experts of a token; 0 if there are no pairs.
        none: `[pairs]`, the pairs without an expert, whose index is that of some expert; None if there are none.
    """

    rows: Tensor
    slots: Tensor
    index: Tensor
    places: Tensor
    most: int
    none: Tensor | None = None

    def weighted_sum(self, compute: ComputeExperts, tokens: Tensor, weights: Tensor) -> Tensor | None:
        """Return the weighted sum of each token's local experts, `[tokens, hidden]`; None without pairs."""
        if not self.most:
            return None
        inputs, of_pairs = tokens[self.rows], weights[self.rows, self.slots].unsqueeze(1)
        if self.none is not None:
            of_pairs = of_pairs.masked_fill(self.none.unsqueeze(1), 0)
            if tokens.dtype == torch.float16:  # it may overflow, and a weight of 0 would then give NaN
                inputs = inputs.masked_fill(self.none.unsqueeze(1), 0)
        outputs = compute(inputs, self.index.unsqueeze(1), of_pairs)
        # Not index_add, which adds in any order on some devices.
        apart = outputs.new_zeros(len(tokens) * self.most, outputs.shape[1])
        apart = apart.index_copy(0, self.rows * self.most + self.places, outputs)
        return apart.view(len(tokens), self.most, -1).sum(dim=1)


@dataclass(frozen=True)
class Slots:
    """All k experts of each token, local or not, so that shapes do not depend on values.

    Attributes:
        index: `[tokens, k]`, the index among the local experts; the number of local experts means no expert.
    """

    index: Tensor

    def weighted_sum(self, compute: ComputeExperts, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's local experts, `[tokens, hidden]`."""
        return compute(tokens, self.index, weights)


LocalExperts = Pairs | Slots


@dataclass(frozen=True)
class PairCounts:
    """What a rank has to know of its pairs before it computes.

    Attributes:
        pairs: number of pairs of a token and one of the rank's experts.
        most: largest number of the rank's experts that a token has.
    """

    pairs: int
    most: int

    @classmethod
    def of(cls, sums: Iterable[Sequence[int]]) -> Self:
        """Return the counts of a rank from its row of `summed_counts` on each rank that has tokens."""
        _, pairs, most = zip(*sums, strict=True)
        return cls(sum(pairs), max(most))


def counts_of_ranks(top_k_index: Tensor, experts_per_rank: int, num_ranks: int) -> Tensor:
    """Count each rank's experts among those of each token, `[tokens, ranks]`, int64; no value is waited for."""
    owners = top_k_index.div(experts_per_rank, rounding_mode="floor")
    owners = owners.masked_fill((owners < 0) | (owners >= num_ranks), num_ranks)
    counts = owners.new_zeros(len(owners), num_ranks + 1)
    return counts.scatter_add_(1, owners, torch.ones_like(owners))[:, :num_ranks]


def summed_counts(counts: Tensor) -> Tensor:
    """Return the tokens, pairs and largest number of experts of a token for each rank, `[ranks, 3]`."""
    most = counts.amax(dim=0) if len(counts) else counts.new_zeros(counts.shape[1])
    return torch.stack((counts.count_nonzero(dim=0), counts.sum(dim=0), most), dim=1)


@torch.no_grad()
def find_local_experts(
    top_k_index: Tensor, experts_per_rank: int, group: Group, counts: PairCounts | None = None
) -> LocalExperts:
    """Find this rank's experts among the tokens' experts.

    Args:
        top_k_index: `[tokens, k]`, indices among the experts of all ranks.
        experts_per_rank: number of experts on each rank, in the order of ranks.
        group: the ranks.
        counts: the number of pairs that there are; if None and there are several ranks, the device is waited for.
    """
    if needs_static_shapes(top_k_index):
        own = group.rank_tensor(top_k_index) if group.size > 1 else 0  # data, so that all ranks record one graph
        of_own = top_k_index - own * experts_per_rank
        return Slots(of_own.masked_fill((of_own < 0) | (of_own >= experts_per_rank), experts_per_rank))
    if top_k_index.is_meta:
        return expected_pairs(top_k_index, top_k_index.numel() // group.size, experts_per_rank)
    if group.size == 1:
        return _all_pairs(top_k_index, experts_per_rank)
    local = top_k_index - group.rank * experts_per_rank
    is_here = (local >= 0) & (local < experts_per_rank)
    if counts is None:
        own_sums = summed_counts(is_here.sum(dim=1, keepdim=True))
        counts = PairCounts.of(own_sums.tolist())  # the one wait for the device
    rows, slots = is_here.nonzero_static(size=counts.pairs).unbind(dim=1)
    places = is_here.cumsum(dim=1)[rows, slots] - 1
    return Pairs(rows, slots, local[rows, slots], places, counts.most)


def _all_pairs(top_k_index: Tensor, num_experts: int) -> Pairs:
    """Return all pairs, those without an expert as well, so that nothing need be counted."""
    tokens, top_k = top_k_index.shape
    rows = torch.arange(tokens, device=top_k_index.device).repeat_interleave(top_k)
    slots = torch.arange(top_k, device=top_k_index.device).repeat(tokens)
    index = top_k_index.flatten()
    none = (index < 0) | (index >= num_experts)
    return Pairs(rows, slots, index.masked_fill(none, 0), slots, top_k if tokens else 0, none)


def expected_pairs(top_k_index: Tensor, pairs: int, experts_per_rank: int) -> Pairs:
    """Return this number of pairs without values, for the meta device."""
    rows, slots, local, places = (top_k_index.new_zeros(pairs) for _ in range(4))
    return Pairs(rows, slots, local, places, most=min(top_k_index.shape[1], experts_per_rank))


def weights_of_experts(index: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Return the weight of every expert for each token, 0 for experts that the token is not sent to.

    Args:
        index: `[tokens, k]`; `num_experts` means no expert.
        weights: `[tokens, k]`.
        num_experts: number of local experts.

    Returns:
        `[tokens, num_experts]`.
    """
    of_experts = weights.new_zeros(len(weights), num_experts + 1).scatter_add(1, index, weights)
    return of_experts[:, :num_experts]


def rows_of_experts(tokens: Tensor, of_experts: Tensor) -> Tensor:
    """Return the inputs of the experts if each computes for all tokens.

    In float16 a token of other experts may overflow, and a weight of 0 would then give NaN, so an expert gets zeros
    instead of such tokens.

    Args:
        tokens: `[tokens, hidden]`.
        of_experts: `[tokens, num_experts]`, the result of `weights_of_experts`.

    Returns:
        `tokens` itself, or `[num_experts, tokens, hidden]` in float16.
    """
    if tokens.dtype != torch.float16:
        return tokens
    return torch.where((of_experts != 0).t().unsqueeze(-1), tokens, 0.0)


def separate_slots(tokens: Tensor, index: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat each token for each of its experts, for an implementation that does not support "no expert".

    Entries that mean no expert become a token of zeros with the weight 0 for some expert: zeros cannot overflow.

    Args:
        tokens: `[tokens, hidden]`.
        index: `[tokens, k]`; `num_experts` means no expert.
        weights: `[tokens, k]`.
        num_experts: number of local experts.

    Returns:
        `[tokens * k, hidden]`, and index and weights `[tokens * k, 1]`.
    """
    index, weights = index.reshape(-1, 1), weights.reshape(-1, 1)
    is_none = index == num_experts
    repeated = tokens.repeat_interleave(len(index) // max(len(tokens), 1), dim=0)
    return repeated.masked_fill(is_none, 0), index.clamp(max=num_experts - 1), weights.masked_fill(is_none, 0)
