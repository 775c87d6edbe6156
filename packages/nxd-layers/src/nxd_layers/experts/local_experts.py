"""The experts of this rank among the tokens' experts, and the weighted sum of their outputs."""

from collections.abc import Callable
from dataclasses import dataclass

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
        most: largest number of local experts of a token.
    """

    rows: Tensor
    slots: Tensor
    index: Tensor
    places: Tensor
    most: int

    def weighted_sum(self, compute: ComputeExperts, tokens: Tensor, weights: Tensor) -> Tensor | None:
        """Return the weighted sum of each token's local experts, `[tokens, hidden]`; None without pairs."""
        if not self.most:
            return None
        outputs = compute(tokens[self.rows], self.index.unsqueeze(1), weights[self.rows, self.slots].unsqueeze(1))
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


@torch.no_grad()
def find_local_experts(top_k_index: Tensor, experts_per_rank: int, group: Group) -> LocalExperts:
    """Find this rank's experts among the tokens' experts.

    Args:
        top_k_index: `[tokens, k]`, indices among the experts of all ranks.
        experts_per_rank: number of experts on each rank, in the order of ranks.
        group: the ranks.
    """
    if needs_static_shapes(top_k_index):
        own = group.rank_tensor(top_k_index) if group.size > 1 else 0  # data, so that all ranks record one graph
        of_own = top_k_index - own * experts_per_rank
        return Slots(of_own.masked_fill((of_own < 0) | (of_own >= experts_per_rank), experts_per_rank))
    if top_k_index.is_meta:
        return expected_pairs(top_k_index, top_k_index.numel() // group.size, experts_per_rank)
    local = top_k_index - group.rank * experts_per_rank
    is_here = (local >= 0) & (local < experts_per_rank)
    rows, slots = is_here.nonzero(as_tuple=True)
    numbers = is_here.cumsum(dim=1)
    most = int(numbers.max()) if len(rows) else 0
    return Pairs(rows, slots, local[rows, slots], numbers[rows, slots] - 1, most)


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
