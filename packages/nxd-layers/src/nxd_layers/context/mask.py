"""Masks of attention as an interval of keys for each query.

With causal and bidirectional masks, sliding windows, chunks, packed documents, padding at either end, and blocks whose
tokens read each other, such as those of an image, each query reads one run of neighboring positions. So a mask of a
million tokens takes two integers per token, and its empty parts are known without building it.
"""

from dataclasses import dataclass, replace

import torch
from nxd_state import is_lazy_device
from torch import Tensor
from torch.utils._pytree import register_dataclass


@dataclass(frozen=True)
class MaskRule:
    """The keys of its own document that a query may read.

    Attributes:
        causal: no keys after the query.
        window: number of keys up to and including the query; without `causal`, on each side of it. None: no limit.
        chunk: length of chunks, counted from the document's start; a query reads keys of its own chunk only. None: no
            chunks.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """The keys of each query.

    Attributes:
        first: `[batch or 1, seq]`, int64, the first key that the query at this position may read.
        last: `[batch or 1, seq]`, int64, the last key; before `first` if there are none.
    """

    first: Tensor
    last: Tensor

    @property
    def length(self) -> int:
        """Length of the sequence."""
        return self.first.shape[1]

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The mask of some queries and keys by their positions: bool `[batch or 1, 1, queries, keys]`."""
        first, last = (it[:, queries, None] for it in (self.first, self.last))
        return ((keys >= first) & (keys <= last)).unsqueeze(1)

    def filled_to(self, length: int) -> "IntervalMask":
        """The mask of the padded sequence, in which only padding reads padding."""
        further = torch.arange(self.length, length, device=self.first.device).expand(len(self.first), -1)
        first = torch.cat([self.first, self.first[:, -1:].expand_as(further)], dim=1)
        return IntervalMask(first, torch.cat([self.last, further], dim=1))

    def within_window(self, window: int) -> "IntervalMask":
        """The mask without keys that are `window` or more positions before their query."""
        first = torch.arange(1 - window, self.length + 1 - window, device=self.first.device)
        return replace(self, first=torch.maximum(self.first, first))

    def to(self, device: torch.device) -> "IntervalMask":
        """The same mask on a device."""
        return replace(self, first=self.first.to(device), last=self.last.to(device))


register_dataclass(IntervalMask)  # pipeline stages send it to one another


def interval_mask(
    length: int,
    rule: MaskRule,
    *,
    document_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    device: torch.device | str | None = None,
) -> IntervalMask:
    """Return the mask of a rule in a sequence of documents, or in a padded sequence.

    Args:
        length: length of the sequence.
        rule: the rule within each document.
        document_ids: integer `[batch or 1, seq]`, the document of each token; tokens of a document are neighbors.
        padding_mask: bool or integer `[batch, seq]`, true for tokens, which are neighbors: no query reads padding.
        device: device of the mask; the other tensors' device if they are given. Otherwise the mask for a device that
            records graphs is on the CPU, since it is the same in all steps.

    Raises:
        ValueError: both are given, or there is padding between tokens, or a document begins a second time.
        NotImplementedError: one is given on a device that records graphs.
    """
    if document_ids is not None and padding_mask is not None:
        raise ValueError("document_ids and padding_mask cannot be combined; give padding a document id of its own")
    given = document_ids if document_ids is not None else padding_mask
    if given is not None:
        device = given.device
        if is_lazy_device(device):
            raise NotImplementedError(
                "packed documents and padding of cut sequences must be read during a step, which XLA does not support; "
                "pass whole rows of tokens, or use context_parallel_size=1"
            )
    elif device is not None and is_lazy_device(device):
        device = "cpu"
    position = torch.arange(length, device=device).unsqueeze(0)
    begin, end = torch.zeros_like(position), torch.full_like(position, length - 1)
    if document_ids is not None:
        begin, end = _document_borders(document_ids)
    elif padding_mask is not None:
        begin, end = _token_borders(padding_mask.bool())
    first, last = begin, end
    if rule.causal:
        last = torch.minimum(end, position) if padding_mask is not None else position
    if rule.window is not None:
        reach = rule.window - 1 if rule.causal else rule.window
        first = torch.maximum(first, position - reach)
        last = last if rule.causal else torch.minimum(last, position + rule.window)
    if rule.chunk is not None:
        chunk_begin = begin + (position - begin).div(rule.chunk, rounding_mode="floor") * rule.chunk
        first = torch.maximum(first, chunk_begin)
        last = torch.minimum(last, chunk_begin + rule.chunk - 1)
    first, last = torch.broadcast_tensors(first, last)
    return IntervalMask(first, last)


def with_blocks(
    mask: IntervalMask, block_ids: Tensor, *, document_ids: Tensor | None = None, padding_mask: Tensor | None = None
) -> IntervalMask:
    """Return the mask in which the queries of a block read all tokens of their block, too.

    Args:
        mask: a mask of these documents, or of this padding, in which each token reads itself.
        block_ids: integer `[batch or 1, seq]`, the block of each token, negative for tokens in no block. Tokens of a
            block are neighbors; a block ends with its document.
        document_ids: see `interval_mask`.
        padding_mask: see `interval_mask`; padding is in no block.

    Raises:
        ValueError: there are other tokens inside a block.
        NotImplementedError: `block_ids` are on a device that records graphs.
    """
    if is_lazy_device(block_ids.device):
        raise NotImplementedError(
            "blocks of tokens that read each other must be read during a step, which XLA does not support; use "
            "context_parallel_size=1"
        )
    ids = block_ids if padding_mask is None else block_ids.where(padding_mask.bool(), -1)
    is_inside = ids >= 0
    if document_ids is not None:
        ids = (document_ids * (ids.max() + 1) + ids).where(is_inside, -1)
        is_inside = is_inside.expand_as(ids)
    starts = _starts(ids) & is_inside
    for row, (of_row, inside) in enumerate(zip(ids, is_inside, strict=True)):
        if int(starts[row].sum()) != len(of_row[inside].unique()):
            raise ValueError(f"row {row} has other tokens inside a block of tokens that read each other")
    begin, end = _borders(_starts(ids))
    return IntervalMask(
        torch.minimum(mask.first, begin).where(is_inside, mask.first),
        torch.maximum(mask.last, end).where(is_inside, mask.last),
    )


def _document_borders(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last position of each position's document."""
    starts = _starts(ids)
    if int(starts.sum()) != sum(len(row.unique()) for row in ids):
        raise ValueError("a document of document_ids begins a second time; give each run of tokens its own number")
    return _borders(starts)


def _starts(ids: Tensor) -> Tensor:
    """Where another run of equal ids begins: bool `[batch, seq]`."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return starts


def _borders(starts: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last position of each position's run."""
    length = starts.shape[1]
    position = torch.arange(length, device=starts.device).expand_as(starts)
    begin = position.where(starts, 0).cummax(dim=1).values
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    end = position.where(ends, length - 1).flip(1).cummin(dim=1).values.flip(1)
    return begin, end


def _token_borders(is_token: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last token of each row, for every position."""
    length = is_token.shape[1]
    position = torch.arange(length, device=is_token.device).expand_as(is_token)
    begin = position.where(is_token, length).amin(dim=1, keepdim=True)
    end = position.where(is_token, -1).amax(dim=1, keepdim=True)
    between = (position >= begin) & (position <= end) & ~is_token
    if bool(between.any()):
        row, place = between.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} of the attention mask has padding between tokens, at position {place}; pad at the ends only"
        )
    return begin.expand_as(position), end.expand_as(position)
