"""Attention over a sequence that is cut over the context-parallel ranks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from nxd_state import Group, active_group, is_lazy_device
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.context.attention_kernels import Scores
from nxd_layers.context.block_attention import (
    Dropout,
    accumulation_dtype,
    attend_block,
    attend_block_backward,
    draw_dropout,
)
from nxd_layers.context.exchange import (
    SEQUENCE,
    Exchange,
    GatherExchange,
    NoExchange,
    Pieces,
    RingExchange,
    exchange_heads,
    return_heads,
    splits_heads,
)
from nxd_layers.context.plan import AttentionPlan, Block

Transport = Literal["ring", "all_gather", "all_to_all"]

# Below this one message for each pair of ranks is faster than one after the other, which computing hides.
_SMALL_MESSAGE = 1 << 20  # bytes


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    transport: Transport | None = None,
) -> Tensor:
    """`softmax(scale * Q K^T + mask) V` over all positions, of which each rank has a part. Called by all ranks.

    Gradients are those of the whole sequence's attention, including the contributions of other ranks' queries to this
    rank's keys and values. Transports differ in what they send: keys and values step by step ("ring") or at once
    ("all_gather"), or queries, keys, values and outputs, so that each rank has whole sequences of some heads
    ("all_to_all", Jacobs et al. 2023, "DeepSpeed Ulysses").

    Args:
        query: `[batch, heads, local, head]`, for this rank's positions in ascending order.
        key: `[batch, kv_heads, local, head]`; each serves a run of consecutive query heads.
        value: `[batch, kv_heads, local, value_head]`.
        plan: plan of the mask; the same on all ranks.
        scale: scale of the scores; 1 / sqrt(head) if None.
        softcap: see `Scores`.
        sinks: `[heads]`, an additional score of each head, which takes weight but has no value (Xiao et al. 2023).
        dropout: probability that a weight is dropped. The dropped weights depend on the first rank's random state, not
            on the context-parallel size or the transport; torch's own attention drops different ones.
        transport: the transport; the cheapest if None.

    Returns:
        `[batch, heads, local, value_head]`, zeros for a query without keys.

    Raises:
        ValueError: sizes do not fit the plan, `dropout` is outside [0, 1), heads cannot be split over the ranks for
            "all_to_all", or the transport is unknown.
        NotImplementedError: while torch compiles; on XLA, where one graph serves all ranks, with dropout, with pipeline
            stages, or with a transport other than "all_to_all".
    """
    group = active_group("cp")
    _check(query, key, value, plan, group, transport)
    if is_lazy_device(query):
        _check_recorded(query, key, group, transport, dropout)
        transport = "all_to_all"
    transport = transport if transport is not None else cheapest_transport(query, key, value, plan)
    scores = Scores(query.shape[-1] ** -0.5 if scale is None else scale, softcap)
    drawn = draw_dropout(dropout, query.shape[1], query.device)
    if transport == "all_to_all":
        query, key, value, sinks = exchange_heads(query, key, value, sinks, plan.cut, group)
        whole = plan.of_one_rank
        if drawn is not None:
            drawn = replace(drawn, first_head=drawn.first_head + group.rank * query.shape[1])
        output: Tensor = _Attention.apply(query, key, value, sinks, whole, 0, scores, drawn, NoExchange(whole))
        return return_heads(output, plan.cut, group)
    exchange = GatherExchange(plan, group) if transport == "all_gather" else RingExchange(plan, group)
    result: Tensor = _Attention.apply(query, key, value, sinks, plan, group.rank, scores, drawn, exchange)
    return result


def cheapest_transport(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Transport:
    """Return the transport that sends the fewest bytes in forward; all ranks choose the same.

    The arguments are those of `context_parallel_attention`.
    """
    size, local = plan.cut.size, plan.cut.local_length
    of_keys = key.shape[1] * (key.shape[-1] + value.shape[-1])
    of_queries = query.shape[1] * (query.shape[-1] + value.shape[-1])
    bytes_each = query.shape[0] * query.element_size()
    exchanged = plan.most_received * of_keys * bytes_each
    copies = max(1, size // key.shape[1])
    of_heads = local * (of_queries + of_keys * copies) * (size - 1) // size * bytes_each
    if splits_heads(query.shape[1], key.shape[1], size) and of_heads < exchanged:
        return "all_to_all"
    return "ring" if exchanged >= _SMALL_MESSAGE else "all_gather"


def _check(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, group: Group, transport: str | None) -> None:
    if transport is not None and transport not in get_args(Transport):
        raise ValueError(f"unknown transport={transport!r}; use one of {', '.join(get_args(Transport))}")
    if plan.cut.size != group.size:
        raise ValueError(f"the plan is for {plan.cut.size} context-parallel ranks, but {group} has {group.size}")
    if {it.shape[SEQUENCE] for it in (query, key, value)} != {plan.cut.local_length}:
        raise ValueError(
            f"queries, keys and values have {query.shape[SEQUENCE]}, {key.shape[SEQUENCE]} and "
            f"{value.shape[SEQUENCE]} positions, but the plan has {plan.cut.local_length} per rank"
        )
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise ValueError(
            f"{key.shape[1]} key heads and {value.shape[1]} value heads for {query.shape[1]} query heads; they must "
            "be equal and divide the query heads"
        )
    if transport == "all_to_all" and not splits_heads(query.shape[1], key.shape[1], group.size):
        raise ValueError(
            f"transport='all_to_all' cannot split {query.shape[1]} query heads and {key.shape[1]} key heads over "
            f"{group.size} ranks; use 'ring' or 'all_gather', or a context-parallel size that divides the heads"
        )
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "torch.compile does not support context parallelism; use context_parallel_size=1, with "
            "sequence_parallel=True for long sequences"
        )


def _check_recorded(query: Tensor, key: Tensor, group: Group, transport: str | None, dropout: float) -> None:
    """Check that one graph can serve all ranks: only with whole sequences do all compute the same blocks."""
    if transport not in (None, "all_to_all") or not splits_heads(query.shape[1], key.shape[1], group.size):
        raise NotImplementedError(
            f"transport={transport!r} with {query.shape[1]} query heads and {key.shape[1]} key heads: on XLA sequences "
            f"cut over {group.size} ranks need 'all_to_all', which gathers them for some heads; use it with a "
            "context-parallel size that divides the query heads, and divides the key heads or is a multiple of them"
        )
    if active_group("pp").size > 1:
        raise NotImplementedError("pipeline stages do not cut sequences on XLA; use pipeline_parallel_size=1")
    if dropout:
        raise NotImplementedError(
            f"dropout={dropout} of cut sequences draws a seed in each step, which XLA does not support; use 0"
        )


class _Attention(Function):
    """Combines the blocks of this rank's queries, as one node, so that no scores are kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: AttentionPlan,
        rank: int,
        scores: Scores,
        dropout: Dropout | None,
        exchange: Exchange,
    ) -> Tensor:
        own = _OwnBlocks(plan, rank, dropout, query.device)
        dtype = accumulation_dtype(query.dtype)
        total = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
        log_sum = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for pieces in exchange.pieces(torch.cat([key, value], dim=-1)):
            for block, rows, keys in own.of(pieces):
                part_key, part_value = keys.split([key.shape[-1], value.shape[-1]], dim=-1)
                part, part_sum = attend_block(
                    query[:, :, rows],
                    part_key,
                    part_value,
                    scores,
                    mask=own.mask_of(block),
                    causal=block.is_causal,
                    dropout=own.dropout_of(block),
                )
                _merge(total[:, :, rows], log_sum[:, :, rows], part, part_sum)
        if sinks is not None:
            with_sinks = _log_added(log_sum, sinks.to(dtype)[:, None])
            total *= (log_sum - with_sinks).exp().unsqueeze(-1)
            log_sum = with_sinks
        log_sum.masked_fill_(log_sum == -torch.inf, 0.0)
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.own, ctx.scores, ctx.exchange = own, scores, exchange
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        own, scores, exchange = ctx.own, ctx.scores, ctx.exchange
        grad_query = torch.zeros_like(query, dtype=log_sum.dtype)
        keys_and_values = torch.cat([key, value], dim=-1)

        def gradients() -> Iterator[Pieces]:
            for pieces in exchange.pieces(keys_and_values):
                found = {chunk: torch.zeros_like(piece, dtype=log_sum.dtype) for chunk, piece in pieces.items()}
                for block, rows, keys in own.of(pieces):
                    part_key, part_value = keys.split([key.shape[-1], value.shape[-1]], dim=-1)
                    of_query, of_key, of_value = attend_block_backward(
                        grad[:, :, rows],
                        query[:, :, rows],
                        part_key,
                        part_value,
                        output[:, :, rows],
                        log_sum[:, :, rows],
                        scores,
                        mask=own.mask_of(block),
                        causal=block.is_causal,
                        dropout=own.dropout_of(block),
                    )
                    grad_query[:, :, rows] += of_query
                    own.piece_of(block, found).add_(torch.cat([of_key, of_value], dim=-1))
                yield found

        like = torch.empty_like(keys_and_values, dtype=log_sum.dtype)
        grad_key, grad_value = exchange.return_gradients(gradients(), like).split(
            [key.shape[-1], value.shape[-1]], dim=-1
        )
        grad_sinks = None
        if sinks is not None:
            weights = (sinks.to(log_sum.dtype)[:, None] - log_sum).exp()
            grad_sinks = -(weights * (grad * output).sum(dim=-1)).sum(dim=(0, 2)).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, *[None] * 5


class _OwnBlocks:
    """The blocks of a rank, and the places of their queries and keys."""

    def __init__(self, plan: AttentionPlan, rank: int, dropout: Dropout | None, device: torch.device) -> None:
        self._plan = plan
        self._rank = rank
        self._dropout = dropout
        self._device = device

    def of(self, pieces: Pieces) -> Iterator[tuple[Block, slice, Tensor]]:
        """The blocks whose keys are in these pieces, the rows of their queries, and their keys."""
        for block in self._plan.blocks[self._rank]:
            if block.chunk in pieces:
                yield block, self._rows_of(block), self.piece_of(block, pieces)

    def piece_of(self, block: Block, pieces: Pieces) -> Tensor:
        """A block's keys, or their gradients, as a view."""
        first, _ = self._plan.needs[self._rank][block.chunk]
        return pieces[block.chunk].narrow(SEQUENCE, block.keys[0] - first, block.keys[1] - block.keys[0])

    def mask_of(self, block: Block) -> Tensor | None:
        """The mask of a block; None if its queries read all keys, or all up to their own."""
        return self._plan.mask_of(block, self._device)

    def dropout_of(self, block: Block) -> Dropout | None:
        """The dropout of a block's weights."""
        if self._dropout is None:
            return None
        return replace(self._dropout, first_query=block.queries[0], first_key=block.keys[0])

    def _rows_of(self, block: Block) -> slice:
        length = self._plan.cut.chunk_length
        chunk = block.queries[0] // length
        begin = (self._plan.cut.chunks_of(self._rank).index(chunk) - chunk) * length
        return slice(begin + block.queries[0], begin + block.queries[1])


def _merge(total: Tensor, log_sum: Tensor, part: Tensor, part_sum: Tensor) -> None:
    """Merge a block's output into the total, in place."""
    both = _log_added(log_sum, part_sum)
    known = both.masked_fill(both == -torch.inf, 0.0)
    total.mul_((log_sum - known).exp().unsqueeze(-1)).add_(part * (part_sum - known).exp().unsqueeze(-1))
    log_sum.copy_(both)


def _log_added(one: Tensor, other: Tensor) -> Tensor:
    """`torch.logaddexp`, which torch-xla does not lower."""
    return torch.stack(torch.broadcast_tensors(one, other)).logsumexp(dim=0)
