"""The mathematics of the old library's attention kernels, rotary positions, and batches cut for context parallelism."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from nxd_layers import CoreAttention
from nxd_layers.context import AttentionPlan, MaskRule, SequenceCut, context_parallel_attention, interval_mask
from nxd_state import (
    active_group,
    get_context_parallel_rank,
    get_context_parallel_size,
    model_parallel_is_initialized,
)
from torch import Tensor

ROPE_DEFAULTS = {
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def nki_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lnc: int = 1,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Tensor | None = None,
    hardware_type: Any = None,
    transpose_nki_inputs: bool = True,
) -> Tensor:
    """`softmax(scale * Q K^T) V`, by `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        q: `[batch, heads, head, seq]`, or `[batch, heads, seq, head]` without `transpose_nki_inputs`.
        k: like `q`, with as many heads or fewer; each serves consecutive query heads.
        v: like `k`.
        lnc: physical cores in a logical core; accepted without effect.
        dropout_p: dropout probability of the attention weights.
        softmax_scale: scale of the scores; 1 / sqrt(head) if None.
        causal: whether a query attends only to keys up to its own position.
        mixed_precision: accepted without effect; torch always accumulates in float32.
        seed: accepted without effect; dropout uses torch's random state.
        hardware_type: accepted without effect.
        transpose_nki_inputs: whether the sequence is the last dim of the inputs, the layout of the kernel.

    Returns:
        `[batch, heads, seq, head]` either way.

    Raises:
        ValueError: the key heads do not divide the query heads, or the dropout is outside [0, 1).
    """
    if transpose_nki_inputs:
        q, k, v = permute(q, k, v)
    attention = CoreAttention(causal=causal, dropout=dropout_p, scale=softmax_scale)
    return attention(q, k, v)


def nki_ring_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_id: int | Tensor = 0,
    src_tgt_pairs: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """`softmax(scale * Q K^T) V` of a sequence that is split into consecutive parts over the context-parallel ranks.

    Args:
        q: `[batch, heads, seq/cp, head]`, for the positions that `get_batch_on_this_context_parallel_rank` returns.
        k: like `q`, with as many heads or fewer; each serves consecutive query heads.
        v: like `k`.
        rank_id: accepted without effect; the mesh provides it.
        src_tgt_pairs: accepted without effect; the mesh provides the ring.
        dropout_p: dropout probability of the attention weights, from torch's random state, the same on all ranks.
        softmax_scale: scale of the scores; 1 / sqrt(head) if None.
        causal: whether a query attends only to keys up to its own position.
        mixed_precision: accepted without effect; sums are always in float32.
        seed: accepted without effect.

    Returns:
        `[batch, heads, seq/cp, head]`.

    Raises:
        ValueError: the number of positions is odd, or the key heads do not divide the query heads.
    """
    size, local = active_group("cp").size, q.shape[2]
    if local % 2:
        raise ValueError(f"each rank has {local} positions; use an even number")
    length = local * size
    mask = interval_mask(length, MaskRule(causal=causal), device=q.device)
    plan = AttentionPlan(mask, SequenceCut(length, size, "contiguous"))
    return context_parallel_attention(q, k, v, plan, scale=softmax_scale, dropout=dropout_p)


def permute(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three with their last two dims swapped."""
    return q.transpose(-2, -1), k.transpose(-2, -1), v.transpose(-2, -1)


def rotate_half(x: Tensor, flash_attn: bool, transpose: bool) -> Tensor:
    """Swap the halves of the head dim and negate the new first half.

    `x` is `[batch, heads, seq, head]`; `[batch, heads, head, seq]` with both flags.
    """
    dim = -2 if flash_attn and transpose else -1
    first, second = x.chunk(2, dim=dim)
    return torch.cat([-second, first], dim=dim)


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    flash_attn: bool,
    transpose_nki_inputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply rotary positions (Su et al. 2021) to queries and keys, whose last dim may be the sequence.

    Args:
        q: `[batch, heads, seq, head]`; `[batch, heads, head, seq]` where `flash_attn` and `transpose_nki_inputs`.
        k: like `q`, with its own number of heads.
        cos: `[positions, head]` with `position_ids`, else `[batch, seq, head]`.
        sin: like `cos`.
        position_ids: `[batch, seq]` int64, or None.
        flash_attn: whether the inputs are for a flash attention kernel.
        transpose_nki_inputs: whether the sequence is the last dim of the kernel's inputs.

    Returns:
        Queries and keys of the same shapes.
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [batch, 1, seq, head]
    if flash_attn and transpose_nki_inputs:
        cos, sin = cos.transpose(-2, -1), sin.transpose(-2, -1)
    rotated_q = rotate_half(q, flash_attn, transpose_nki_inputs)
    rotated_k = rotate_half(k, flash_attn, transpose_nki_inputs)
    return q * cos + rotated_q * sin, k * cos + rotated_k * sin


IGNORED_LABEL = -100  # of the losses of torch, transformers and nxd_layers
ValueT = TypeVar("ValueT")


def shift_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shift `labels` one token to the left, so that each position has its next token's label.

    Args:
        batch: tensors by name; `labels` `[batch, seq]`.

    Returns:
        The same tensors, and new `labels` `[batch, seq]` whose last column is ignored by losses (-100).
    """
    shifted = dict(batch)
    if "labels" in batch:
        labels = batch["labels"]
        ignored = labels.new_full((labels.shape[0], 1), IGNORED_LABEL)
        shifted["labels"] = torch.cat([labels[:, 1:], ignored], dim=1)
    return shifted


def get_batch_on_this_context_parallel_rank(batch: Mapping[str, ValueT]) -> Mapping[str, ValueT]:
    """Return this context-parallel rank's part of a batch along the sequence; labels are shifted first.

    The parts are neighboring positions, as `nki_ring_attn_func` takes them. Models of transformers and
    `LlamaForCausalLM` cut their sequences themselves, and are given whole batches.

    Args:
        batch: tensors `[batch, seq, ...]` by name; None and tensors with one position are not cut.

    Returns:
        `[batch, seq/cp, ...]`; the batch itself where there is one rank.

    Raises:
        ValueError: the ranks do not divide a sequence.
    """
    if not model_parallel_is_initialized() or get_context_parallel_size() == 1:
        return batch
    size, rank = get_context_parallel_size(), get_context_parallel_rank()
    parts: dict[str, Any] = dict(batch)
    for name, value in shift_labels(parts).items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] > 1:
            if value.shape[1] % size:
                raise ValueError(
                    f"{name} has {value.shape[1]} positions, which context_parallel_size={size} does not divide; pad "
                    f"it to {-(-value.shape[1] // size) * size}"
                )
            parts[name] = value.chunk(size, dim=1)[rank].contiguous()
    return parts


def apply_scaling(freqs: Tensor, **kwargs: Any) -> Tensor:
    """Stretch the low frequencies of rotary positions (Su et al. 2021) for longer sequences, as Llama 3.1 does.

    Args:
        freqs: radians per position, `[head/2]`.
        **kwargs: values that replace those of `ROPE_DEFAULTS`.

    Returns:
        `[head/2]`: high frequencies unchanged, low ones divided by `factor`, and a smooth transition between.
    """
    chosen = {**ROPE_DEFAULTS, **kwargs}
    waves_in_context = chosen["original_max_position_embeddings"] * freqs / (2 * math.pi)
    low, high = chosen["low_freq_factor"], chosen["high_freq_factor"]
    kept = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return (kept + (1 - kept) / chosen["factor"]) * freqs


def precompute_freqs_cis(
    dim: int,
    end: int,
    theta: float = 10000.0,
    use_scaled: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the angle of each pair of elements at each position.

    Args:
        dim: length of a head's vectors.
        end: number of positions.
        theta: base of the frequencies.
        use_scaled: whether to call `apply_scaling`.
        device: device of the result.
        **kwargs: for `apply_scaling`.

    Returns:
        Radians, `[end, dim/2]` float32.
    """
    exponents = torch.arange(0, dim, 2, device=device)[: dim // 2].float() / dim
    freqs = 1.0 / (theta**exponents)
    if use_scaled:
        freqs = apply_scaling(freqs, **kwargs)
    return torch.outer(torch.arange(end, device=freqs.device, dtype=torch.float32), freqs)


def apply_rotary_polar_compatible(query: Tensor, key: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair (2i, 2i + 1) of queries and keys by its position's angle, as a product of complex numbers.

    Args:
        query: `[batch, seq, heads, head]`.
        key: `[batch, seq, key heads, head]`.
        freqs_cis: radians, `[batch, seq, head/2]` float32.

    Returns:
        Both, in their own dtypes.

    Raises:
        ValueError: the angles are not float32.
    """
    if freqs_cis.dtype != torch.float32:
        raise ValueError(
            f"freqs_cis is {freqs_cis.dtype}; expected torch.float32, which keeps the angles of far positions exact"
        )
    cos, sin = freqs_cis.cos().unsqueeze(2), freqs_cis.sin().unsqueeze(2)

    def rotated(vectors: Tensor) -> Tensor:
        real, imaginary = vectors[..., ::2], vectors[..., 1::2]
        pairs = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        return pairs.flatten(-2).type_as(vectors)

    return rotated(query), rotated(key)
