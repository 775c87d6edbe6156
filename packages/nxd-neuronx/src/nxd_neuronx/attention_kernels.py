"""The functions behind upstream's attention kernels, as the mathematics that they compute."""

from typing import Any

import torch
from nxd_layers import CoreAttention
from nxd_layers.context import AttentionPlan, MaskRule, SequenceCut, context_parallel_attention, interval_mask
from nxd_state import active_group
from torch import Tensor


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
        k: as `q`, with as many heads or fewer: each serves a run of consecutive query heads.
        v: as `k`.
        lnc: physical cores of a logical one; accepted without effect.
        dropout_p: probability that an attention weight is dropped.
        softmax_scale: scale of the scores; 1 / sqrt(head) if None.
        causal: whether a query attends only to keys up to its own position.
        mixed_precision: accepted without effect; torch accumulates in float32 in any case.
        seed: accepted without effect; dropout uses torch's random streams.
        hardware_type: accepted without effect.
        transpose_nki_inputs: whether the inputs have the sequence last, as the kernel reads them.

    Returns:
        `[batch, heads, seq, head]` in either case.

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
    """`softmax(scale * Q K^T) V` of a sequence of which each context-parallel rank has neighboring positions.

    Args:
        q: `[batch, heads, seq/cp, head]`, of the positions that `get_batch_on_this_context_parallel_rank` gives.
        k: as `q`, with as many heads or fewer: each serves a run of consecutive query heads.
        v: as `k`.
        rank_id: accepted without effect; the mesh determines it.
        src_tgt_pairs: accepted without effect; the mesh determines the ring.
        dropout_p: probability that an attention weight is dropped, by torch's random state, alike on all ranks.
        softmax_scale: scale of the scores; 1 / sqrt(head) if None.
        causal: whether a query attends only to keys up to its own position.
        mixed_precision: accepted without effect; sums are in float32 in any case.
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

    Args:
        x: `[batch, heads, seq, head]`; `[batch, heads, head, seq]` with both flags.
        flash_attn: whether the inputs are for a flash attention kernel.
        transpose: whether the kernel has the sequence last.
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
    """Rotary positions (Su et al. 2021) for queries and keys that may have the sequence last.

    Args:
        q: `[batch, heads, seq, head]`; `[batch, heads, head, seq]` where `flash_attn` and `transpose_nki_inputs`.
        k: as `q`, with its own number of heads.
        cos: `[positions, head]` with `position_ids`, else `[batch, seq, head]`.
        sin: as `cos`.
        position_ids: `[batch, seq]` int64, or None.
        flash_attn: whether they are for a flash attention kernel.
        transpose_nki_inputs: whether the kernel has the sequence last.

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
