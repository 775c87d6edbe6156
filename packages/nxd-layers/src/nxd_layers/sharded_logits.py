"""Choosing tokens from logits that are split along the vocabulary, without gathering them.

Each rank sends only its own best candidates, in one all-gather, and every rank then picks the same ones. Between
equal logits the lowest token id wins, so the result does not depend on the tensor-parallel degree.
"""

import torch
from nxd_state import Group, active_group, all_gather
from torch import Tensor

from nxd_layers.tracing import leaf_of_traces


@leaf_of_traces
@torch.no_grad()
def parallel_argmax(logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """The likeliest token, as `torch.argmax` over the whole logits' last dim would give it.

    Args:
        logits: `[..., vocab/tp]`, any float dtype, without NaN.
        vocab_size: number of tokens, if the logits' dim is padded: padding is never chosen.

    Returns:
        `[...]` int64, the same on every rank; the lowest id among equal logits.

    Raises:
        ValueError: a vocab_size of more than there are logits.
    """
    group = active_group("tp")
    own = _without_padding(logits, vocab_size, group)
    ids = own.argmax(dim=-1, keepdim=True)  # the first of equal ones
    values, ids = _all_candidates(own.gather(-1, ids), ids, own.shape[-1], group)
    return ids.gather(-1, values.argmax(dim=-1, keepdim=True)).squeeze(-1)


@leaf_of_traces
@torch.no_grad()
def parallel_topk(logits: Tensor, k: int, *, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens, likeliest first.

    Args:
        logits: `[..., vocab/tp]`, any float dtype, without NaN.
        k: number of tokens; may exceed the size of a rank's part of the vocabulary.
        vocab_size: number of tokens, if the logits' dim is padded: padding is never chosen.

    Returns:
        Logits `[..., k]`, in the dtype given, and token ids `[..., k]` int64; the same on every rank. Equal logits
        come in the order of their ids, and the lowest ids are taken. No gradient flows through them.

    Raises:
        ValueError: k is not in 1..vocabulary, or a vocab_size of more than there are logits.
    """
    group = active_group("tp")
    own = _without_padding(logits, vocab_size, group)
    vocab = own.shape[-1] * group.size if vocab_size is None else vocab_size
    if not 1 <= k <= vocab:
        raise ValueError(f"k={k} is outside 1..{vocab}, the size of the vocabulary")
    values, ids = _all_candidates(*_first_topk(own, min(k, own.shape[-1])), own.shape[-1], group)
    # Among equal values the ranks' candidates are in the order of their ids, and a stable sort leaves them so.
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].to(logits.dtype), ids.gather(-1, order[..., :k])


def _first_topk(own: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` with the lowest indices among equal values: it does not say itself which ones it takes."""
    length = own.shape[-1]
    smallest = own.topk(k, dim=-1).values[..., -1:]
    # Distinct numbers, larger for what is to be taken first: all above the smallest, then its equals by index.
    priority = torch.where(own > smallest, 2 * length, torch.where(own == smallest, length, 0))
    priority = priority - torch.arange(length, device=own.device)
    indices = priority.topk(k, dim=-1).indices.sort(dim=-1).values
    values, order = own.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, order)


def _all_candidates(values: Tensor, indices: Tensor, local_vocab: int, group: Group) -> tuple[Tensor, Tensor]:
    """Candidates `[..., k]` of every rank, `[..., tp*k]`: values, and ids in the whole vocabulary."""
    if group.size == 1:
        return values, indices
    # One message for both: an index below 2**24 is exact in float32, too.
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    pairs = all_gather(torch.stack([values, indices.to(values.dtype)]), group, dim=-1)
    first_ids = torch.arange(group.size, device=values.device).repeat_interleave(indices.shape[-1]) * local_vocab
    return pairs[0], pairs[1].long() + first_ids


def _without_padding(logits: Tensor, vocab_size: int | None, group: Group) -> Tensor:
    """This rank's logits with those of no token at minus infinity."""
    if vocab_size is None:
        return logits
    local_vocab = logits.shape[-1]
    if not 0 < vocab_size <= local_vocab * group.size:
        raise ValueError(
            f"vocab_size={vocab_size} does not fit {local_vocab * group.size} logits; use 1..{local_vocab * group.size}"
        )
    if vocab_size == local_vocab * group.size:
        return logits
    ids = torch.arange(local_vocab, device=logits.device) + group.rank_tensor(logits) * local_vocab
    return logits.masked_fill(ids >= vocab_size, -torch.inf)
