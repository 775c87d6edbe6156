"""Attention of some queries to some of their keys, with dropout, and its gradients, to combine with other keys'.

A block's output is normalized over the block's own keys, and comes with the logarithm of the sum of their weights, so
that outputs of several blocks can be weighed against each other (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"). Backward takes the output and the logarithm of all keys, and gives a block's share of the
gradients (Dao et al. 2022, "FlashAttention").
"""

from dataclasses import dataclass, replace

import torch
from nxd_state import active_group, broadcast, log_slow_path
from torch import Tensor

from nxd_layers.context.attention_kernels import AttentionKernel, Scores, kernel_for

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # of SplitMix64 (Steele et al. 2014), as signed numbers
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BITS = 31  # of a random number


@dataclass(frozen=True)
class Dropout:
    """Dropout of the attention weights of some queries and keys, by their place in the whole sequence.

    Each weight's random number is a hash of its row of the batch, head, query, key, and one seed for all (Salmon et al.
    2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). So the same weights are dropped however a sequence is cut and
    whatever is sent, and backward finds them without storing them.

    Attributes:
        rate: probability that a weight is dropped.
        seed: random seed.
        first_head: number of the first head on this rank.
        first_query: position of the first query.
        first_key: position of the first key.
    """

    rate: float
    seed: int
    first_head: int = 0
    first_query: int = 0
    first_key: int = 0

    def from_query(self, rows: int) -> "Dropout":
        """The same dropout for queries that start `rows` positions later."""
        return replace(self, first_query=self.first_query + rows)

    def factors(self, weights: Tensor) -> Tensor:
        """Factors of the weights `[batch, kv_heads, heads / kv_heads, queries, keys]`: 0, or 1 / (1 - rate)."""
        batch, groups, heads, queries, keys = weights.shape
        numbers = torch.full((1,), self.seed, dtype=torch.int64, device=weights.device)
        for first, count in (
            (0, batch),
            (self.first_head, groups * heads),
            (self.first_query, queries),
            (self.first_key, keys),
        ):
            place = torch.arange(first + 1, first + count + 1, device=weights.device)
            numbers = _mixed(numbers.unsqueeze(-1) + place * _GOLDEN)
        kept = _shifted(numbers, 64 - _BITS) >= int(self.rate * (1 << _BITS))
        return kept.to(weights.dtype).div_(1.0 - self.rate).view(weights.shape)


def draw_dropout(rate: float, num_heads: int, device: torch.device) -> Dropout | None:
    """Draw a seed from torch's generator, on the first context-parallel rank. Called by all ranks of the group.

    Args:
        rate: probability that a weight is dropped; returns None for 0.
        num_heads: number of heads on each tensor-parallel rank.
        device: device of the generator.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout={rate} must be at least 0 and below 1")
    if not rate:
        return None
    seed = torch.randint(1 << 62, (1,), device=device)
    if active_group("cp").size > 1:
        seed = broadcast(seed, active_group("cp"), source=0)
    return Dropout(rate, int(seed), first_head=active_group("tp").rank * num_heads)


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _MIX[0]
    numbers = (numbers ^ _shifted(numbers, 27)) * _MIX[1]
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


# Maximum number of scores in memory without a kernel that keeps them in registers.
_MOST_SCORES = 1 << 24


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    *,
    mask: Tensor | None,
    causal: bool,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a block's queries to its keys.

    Args:
        query: `[batch, heads, queries, head]`.
        key: `[batch, kv_heads, keys, head]`, where each serves a run of query heads.
        value: `[batch, kv_heads, keys, value_head]`.
        scores: definition of the scores.
        mask: bool `[batch or 1, 1, queries, keys]`, true for keys that a query may read; None for all.
        causal: there are as many keys as queries, and each query reads those up to its own place.
        dropout: dropout of the weights; sums are taken before it.

    Returns:
        `[batch, heads, queries, value_head]`, and the logarithm of the sum of the exponentials of each query's scores,
        `[batch, heads, queries]`, in float32 or wider: -inf for a query without keys, whose output is zero.
    """
    kernel = _kernel(query, value, scores, mask, dropout)
    if kernel is not None:
        output, log_sum = kernel.forward(query, key, value, scores, mask, causal)
    else:
        rows = _rows_at_once(query, key)
        parts = [
            _forward_by_products(*inputs, scores)
            for inputs in _in_parts(query, key, value, mask, dropout, causal=causal, rows=rows)
        ]
        output, log_sum = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    if mask is not None:
        log_sum = log_sum.where(mask.any(dim=-1), -torch.inf)
    return output, log_sum


def attend_block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    scores: Scores,
    *,
    mask: Tensor | None,
    causal: bool,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the gradients of queries, keys and values; the arguments are those of `attend_block`.

    `grad` and `output` are the output's gradient and the output for all keys, and `log_sum` is the finite log-sum-exp
    over all keys.
    """
    kernel = _kernel(query, value, scores, mask, dropout)
    if kernel is not None:
        return kernel.backward(grad, query, key, value, output, log_sum, scores, mask, causal)
    rows = _rows_at_once(query, key)
    grad_keys = torch.zeros_like(key, dtype=log_sum.dtype)
    grad_values = torch.zeros_like(value, dtype=log_sum.dtype)
    grad_queries = []
    parts = _in_parts(query, key, value, mask, dropout, causal=causal, rows=rows)
    given = zip(*(it.split(rows, dim=2) for it in (grad, output, log_sum)), strict=True)
    for inputs, (part, out, total) in zip(parts, given, strict=True):
        of_query, of_key, of_value = _backward_by_products(part, *inputs, out, total, scores)
        grad_queries.append(of_query)
        grad_keys += of_key
        grad_values += of_value
    return torch.cat(grad_queries, dim=2), grad_keys, grad_values


def _kernel(
    query: Tensor, value: Tensor, scores: Scores, mask: Tensor | None, dropout: Dropout | None
) -> AttentionKernel | None:
    """The kernel for a block; None if its scores are computed in memory, some rows at a time."""
    kernel = None if dropout is not None else kernel_for(query, value, scores, masked=mask is not None)
    if kernel is None:
        why = "dropout of its weights" if dropout is not None else f"{query.dtype}"
        log_slow_path(
            f"attention over a cut sequence has no kernel for {why}; use bfloat16 and no dropout", query.device
        )
    return kernel


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of weights: float32, or wider for wider inputs."""
    return torch.promote_types(dtype, torch.float32)


def _rows_at_once(query: Tensor, key: Tensor) -> int:
    per_row = query.shape[0] * query.shape[1] * key.shape[2]
    return max(1, min(query.shape[2], _MOST_SCORES // per_row))


def _in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: Dropout | None,
    *,
    causal: bool,
    rows: int,
) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None, Dropout | None]]:
    """The inputs by runs of queries, with the mask and the dropout of each."""
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    queries = query.split(rows, dim=2)
    masks = [None] * len(queries) if mask is None else mask.split(rows, dim=2)
    dropouts = [None if dropout is None else dropout.from_query(number * rows) for number in range(len(queries))]
    return [(part, key, value, *rest) for part, *rest in zip(queries, masks, dropouts, strict=True)]


def _scored(query: Tensor, key: Tensor, scores: Scores, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores `[batch, kv_heads, heads / kv_heads, queries, keys]`, and how fast they grow where they are squashed."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    raw = grouped @ key.unsqueeze(2).transpose(-1, -2) * scores.scale
    slope = None
    if scores.softcap is not None:
        squashed = torch.tanh(raw / scores.softcap)
        raw, slope = squashed * scores.softcap, 1 - squashed.square()
    if mask is not None:
        raw = raw.masked_fill(~mask.unsqueeze(1), -torch.inf)
    return raw, slope


def _forward_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Dropout | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    raw, _ = _scored(query.to(dtype), key.to(dtype), scores, mask)
    log_sum = raw.logsumexp(dim=-1)
    weights = (raw - log_sum.unsqueeze(-1)).exp().nan_to_num_(0.0)  # -inf - -inf: a query that looks at nothing
    if dropout is not None:
        weights *= dropout.factors(weights)
    output = weights @ value.to(dtype).unsqueeze(2)
    return output.flatten(1, 2), log_sum.flatten(1, 2)


def _backward_by_products(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: Dropout | None,
    output: Tensor,
    log_sum: Tensor,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, kv_heads = log_sum.dtype, key.shape[1]
    query, key, value, grad, output = (it.to(dtype) for it in (query, key, value, grad, output))
    raw, slope = _scored(query, key, scores, mask)
    weights = (raw - log_sum.unflatten(1, (kv_heads, -1)).unsqueeze(-1)).exp()
    grouped = grad.unflatten(1, (kv_heads, -1))
    mixed = (grad * output).sum(dim=-1).unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    of_weights = grouped @ value.unsqueeze(2).transpose(-1, -2)
    kept = weights
    if dropout is not None:
        factors = dropout.factors(weights)
        of_weights, kept = of_weights * factors, weights * factors
    of_scores = weights * (of_weights - mixed) * scores.scale
    if slope is not None:
        of_scores = of_scores * slope
    of_query = (of_scores @ key.unsqueeze(2)).flatten(1, 2)
    of_key = (of_scores.transpose(-1, -2) @ query.unflatten(1, (kv_heads, -1))).sum(dim=2)
    of_value = (kept.transpose(-1, -2) @ grouped).sum(dim=2)
    return of_query, of_key, of_value
