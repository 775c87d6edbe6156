"""The arithmetic of balance between experts: the loss for one process, and a microbatch's sums for `router_balance`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from nxd_state import active_group, all_reduce, at_least_float32, get_device, widest_float
from torch import Tensor
from torch.nn import functional as F


def load_balancing_loss(router_logits: Tensor, num_experts: int, top_k: int) -> Tensor:
    """The auxiliary loss of Fedus et al. 2021, "Switch Transformers" (equations 4 to 6), for `top_k` experts.

    Args:
        router_logits: `[tokens, experts]`, of all layers one after the other.
        num_experts: number of experts of a layer.
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


@dataclass
class MicrobatchTokens:
    """The tokens that a router is given in a microbatch.

    Attributes:
        is_token: bool `[tokens]`, false for padding; None if all are tokens.
        tokens: number of tokens in the global batch, without padding.
        sequences: number of sequences with tokens in the global batch.
        shares: `[sequences, 2, experts]`, the share of tokens and the mean probability in each sequence of a layer;
            None without a loss per sequence.
        lengths: `[sequences, 1, 1]`, number of tokens in each sequence, at least 1; with `shares`.
    """

    is_token: Tensor | None
    tokens: Tensor | int
    sequences: Tensor | int
    shares: Tensor | None = None
    lengths: Tensor = field(default_factory=lambda: torch.ones(()))

    def only(self, values: Tensor) -> Tensor:
        """`[tokens, ...]` with zeros for padding, even where it is NaN."""
        if self.is_token is None:
            return values
        return values.masked_fill(~self.is_token.view(-1, *[1] * (values.dim() - 1)), 0.0)


@dataclass
class RouterSums:
    """Sums over layers and tokens.

    Attributes:
        tokens: `[layers, experts]`, the tokens sent to each expert.
        chosen: `[experts]`, how often an expert had one of the largest probabilities, over all layers.
        probabilities: `[experts]`, sums of the probabilities, over all layers.
        rows: 0-d, tokens times layers.
        sequence_loss: 0-d, the sum over layers of the mean over the sequences of the global batch.
        z_loss: 0-d, the sum over layers of the mean over the tokens of the global batch.
    """

    tokens: Tensor
    chosen: Tensor
    probabilities: Tensor
    rows: Tensor
    sequence_loss: Tensor
    z_loss: Tensor

    @classmethod
    def zeros(cls, layers: int, experts: int) -> "RouterSums":
        """Return sums of zero, on this rank's device."""
        shapes: Sequence[tuple[int, ...]] = ((layers, experts), (experts,), (experts,), (), (), ())
        device = get_device()
        return cls(*(torch.zeros(shape, dtype=widest_float(device), device=device) for shape in shapes))

    def over_ranks(self) -> "RouterSums":
        """Return the sums over all tokens and layers; tensor-parallel ranks have the same tokens."""
        parts = list(vars(self).values())
        flat = torch.cat([part.reshape(-1) for part in parts])
        for group in (active_group("dp", "cp"), active_group("pp")):
            flat = all_reduce(flat, group)
        split = flat.split([part.numel() for part in parts])
        return RouterSums(*(new.view_as(old) for new, old in zip(split, parts, strict=True)))


def probabilities_of(logits: Tensor) -> Tensor:
    """Return the probability of each expert, in the dtype of `at_least_float32`."""
    return F.softmax(at_least_float32(logits), dim=-1)


def count_loads(used: Tensor, experts: int, rows: MicrobatchTokens) -> Tensor:
    """Count the tokens of each expert, `[experts]`; `used` is `[tokens, k]`, with other numbers for no expert."""
    counts = (used >= 0) & (used < experts)
    if rows.is_token is not None:
        counts &= rows.is_token.view(-1, 1)
    loads = torch.zeros(experts, dtype=torch.int64, device=used.device)
    return loads.scatter_add_(0, used.clamp(0, experts - 1).flatten().long(), counts.flatten().long())


def one_hot_of_top_k(probabilities: Tensor, top_k: int) -> Tensor:
    """Return `[tokens, experts]`: 1 for each token's `top_k` largest probabilities, 0 elsewhere."""
    chosen = torch.topk(probabilities, top_k, dim=-1).indices
    return torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
