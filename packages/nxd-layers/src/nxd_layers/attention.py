"""Core attention over the queries, keys and values of this rank's heads, and its masks.

Every attention of these packages goes through `CoreAttention`, which is a module of its own so that activation
checkpointing can name it. Projections, rotary positions and caches are the model's.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from nxd_state import active_group, rng_stream
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.column_linear import in_autocast_dtype
from nxd_layers.context import AttentionPlan, context_parallel_attention
from nxd_layers.tracing import leaf_of_traces


class CoreAttention(nn.Module):
    """`softmax(scale * Q K^T + mask) V` by `torch.nn.functional.scaled_dot_product_attention`.

    Needs no communication: heads are split over the tensor-parallel ranks. There may be fewer key and value heads
    than query heads (Ainslie et al. 2023): each serves a run of consecutive query heads.

    Args:
        causal: without a mask, a query looks at keys up to its own position only; otherwise at all. Where there are
            more keys than queries, the first ones come from a cache and the queries stand at the end.
        dropout: probability that an attention weight is dropped in training. Each tensor-parallel rank drops others,
            which needs `nxd_state.seed_model_parallel(seed)`.
        scale: scale of the scores; 1 / sqrt(head size) if None.

    Raises:
        ValueError: `dropout` is outside [0, 1).
    """

    def __init__(self, *, causal: bool = True, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
        self.causal = causal
        self.dropout = dropout
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | AttentionPlan | None = None) -> Tensor:
        """Mix the values.

        Args:
            query: `[batch, heads/tp, queries, head]`.
            key: `[batch, kv_heads/tp, keys, head]`.
            value: as `key`.
            mask: which keys each query may inspect, all told, as `attention_mask` makes it: bool
                `[batch or 1, 1, queries, keys]`. None for what `causal` says. A plan where the sequence is cut over
                context-parallel ranks: queries, keys and values are then of this rank's positions.

        Returns:
            `[batch, heads/tp, queries, head]`; zeros for a query that may inspect nothing.

        Raises:
            ValueError: the key and value heads do not divide the query heads, or the mask has another shape or dtype.
        """
        if isinstance(mask, AttentionPlan):
            return self._over_ranks(query, key, value, mask)
        num_queries, num_keys = query.shape[2], key.shape[2]
        if query.shape[1] % key.shape[1]:
            raise ValueError(
                f"{key.shape[1]} key and value heads do not divide the {query.shape[1]} query heads of this rank; "
                "choose another kv_size_multiplier"
            )
        if mask is None and self.causal and num_queries not in (1, num_keys):
            mask = attention_mask(num_queries, num_keys, device=query.device)
        if mask is not None and (mask.dim() != 4 or mask.shape[2:] != (num_queries, num_keys)):
            raise ValueError(
                f"the mask has shape {tuple(mask.shape)}; expected [batch or 1, 1, {num_queries}, {num_keys}], "
                "as returned by attention_mask() for padding or documents"
            )
        if mask is not None and mask.dtype != torch.bool:  # torch would add it to the scores
            raise ValueError(
                f"the mask is {mask.dtype}; expected torch.bool, True where a query may attend to a key, as "
                "returned by attention_mask()"
            )
        query, key, value = map(in_autocast_dtype, (query, key, value))  # as torch does, but for XLA
        with self._random_stream():
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=mask is None and self.causal and num_queries > 1,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],  # measured on CPU: 2 to 8% faster than repeating the keys
            )

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        query, key, value = map(in_autocast_dtype, (query, key, value))
        with self._random_stream():
            return context_parallel_attention(
                query, key, value, plan, scale=self.scale, dropout=self.dropout if self.training else 0.0
            )

    def _random_stream(self) -> AbstractContextManager[None]:
        split = active_group("tp").size > 1
        return rng_stream("tp") if self.dropout and self.training and split else nullcontext()

    def extra_repr(self) -> str:
        """The arguments."""
        return f"causal={self.causal}, dropout={self.dropout}, scale={self.scale}"


@leaf_of_traces
def attention_mask(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the mask of keys that each query may read. Make it once for all layers of a forward.

    Args:
        num_queries: the last positions of the sequence.
        num_keys: all positions, with those in a cache.
        causal: no query looks at later positions.
        padding_mask: bool or integer `[batch, keys]`, true (or 1) for tokens, false (or 0) for padding: no query looks
            at padding.
        document_ids: integer `[batch, keys]` or `[keys]` of a packed sequence; no query looks at another document.
        device: device of the mask; that of `padding_mask` or `document_ids` if there is one.

    Returns:
        bool `[batch or 1, 1, queries, keys]`, true where a query may look.

    Raises:
        ValueError: more queries than keys, or a mask or ids of another shape or dtype.
    """
    if num_queries > num_keys:
        raise ValueError(
            f"{num_queries} queries do not fit into a sequence of {num_keys} positions; pass at most as many"
        )
    if padding_mask is not None:
        _check_padding_mask(padding_mask, num_keys)
    if document_ids is not None:
        _check_document_ids(document_ids, num_keys)
    device = next((given.device for given in (padding_mask, document_ids) if given is not None), device)
    allowed = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed.tril(diagonal=num_keys - num_queries)
    if padding_mask is not None:
        allowed = allowed & padding_mask.bool()[:, None, None, :]
    if document_ids is not None:
        ids = document_ids.reshape(-1, num_keys)
        allowed = allowed & (ids[:, None, num_keys - num_queries :, None] == ids[:, None, None, :])
    return allowed


def _check_padding_mask(padding_mask: Tensor, num_keys: int) -> None:
    if padding_mask.dim() != 2 or padding_mask.shape[1] != num_keys or not _is_exact(padding_mask):
        raise ValueError(
            f"padding_mask has shape {tuple(padding_mask.shape)} and dtype {padding_mask.dtype}; expected "
            f"[batch, {num_keys}] of bool, or of integers that are 1 for tokens and 0 for padding"
        )


def _check_document_ids(document_ids: Tensor, num_keys: int) -> None:
    is_integer = _is_exact(document_ids) and document_ids.dtype != torch.bool
    if document_ids.dim() not in (1, 2) or document_ids.shape[-1] != num_keys or not is_integer:
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)} and dtype {document_ids.dtype}; expected "
            f"[batch, {num_keys}] or [{num_keys}] of integers, the number of each key's document"
        )


def _is_exact(tensor: Tensor) -> bool:
    """Whether the elements are integers or bools."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def document_ids_from_lengths(cumulative_lengths: Tensor, sequence_length: int) -> Tensor:
    """Number the documents of a packed sequence.

    Args:
        cumulative_lengths: start of each document and end of the last one: `[documents + 1]`, starting with 0.
        sequence_length: length of the packed sequence. Positions after the last document count as another one.

    Returns:
        `[sequence_length]`, int64: 0 for the first document's tokens, 1 for the second's, ...
    """
    positions = torch.arange(sequence_length, device=cumulative_lengths.device)
    return torch.searchsorted(cumulative_lengths, positions, right=True) - 1
