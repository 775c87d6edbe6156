"""Balance between experts: the loss that asks for it, and the capacity that cuts off the rest."""

import math

import torch
from nxd_state import widest_float
from torch import Tensor
from torch.nn import functional as F


def load_balancing_loss(router_logits: Tensor, num_experts: int, top_k: int) -> Tensor:
    """The auxiliary loss of Fedus et al. 2021, "Switch Transformers" (equations 4 to 6), for `top_k` experts.

    Args:
        router_logits: `[tokens, experts]`, of all layers one after the other.
        num_experts: of a layer.
        top_k: experts of each token.

    Returns:
        0-d; 1 where the load is even.
    """
    widest = widest_float(router_logits.device)
    affinities = F.softmax(router_logits.to(widest), dim=-1)
    chosen = torch.topk(affinities, top_k, dim=-1).indices
    share_of_tokens = F.one_hot(chosen, num_experts).sum(dim=1).to(widest).mean(dim=0)
    loss = (share_of_tokens * affinities.mean(dim=0)).sum() * num_experts / top_k
    return loss.to(torch.promote_types(router_logits.dtype, torch.float32))


def within_capacity(expert_index: Tensor, sequences: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """Which of the tokens' experts have room for them: each takes the first ones of every sequence, in its order.

    Args:
        expert_index: `[tokens, k]`.
        sequences: `[sequences, length]`, the tokens of each sequence in their order; each token is there once.
        num_experts: of the layer.
        capacity_factor: what an expert has room for, as a multiple of its even share of a sequence's tokens.

    Returns:
        `[tokens, k]` bool.
    """
    length, top_k = sequences.shape[1], expert_index.shape[1]
    capacity = min(length, math.ceil(length * top_k * capacity_factor / num_experts))
    chosen = F.one_hot(expert_index, num_experts).sum(dim=1)  # [tokens, experts]
    number_in_sequence = torch.empty_like(chosen)
    number_in_sequence[sequences] = chosen[sequences].cumsum(dim=1)
    return number_in_sequence.gather(1, expert_index) <= capacity
