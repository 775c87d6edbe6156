"""The blocks of an attention: which queries meet which keys, on which rank, and whether a mask is needed there.

Blocks leave out what the mask empties, so it is neither computed nor sent. The functions at the end are for models that
split their sequences themselves: this rank's part of a batch, and the plan of its attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from nxd_state import active_group, all_gather
from torch import Tensor
from torch.utils._pytree import register_dataclass

from nxd_layers.context.cut import SequenceCut, balanced_cut
from nxd_layers.context.mask import IntervalMask, MaskRule, interval_mask
from nxd_layers.tracing import leaf_of_traces

# Queries of a block that needs its mask in memory: few, so that only keys near them are computed.
_MASKED_QUERIES = 512

KEPT_MASK_BYTES = 32 * 2**20  # of a plan's masks

Kind = Literal["full", "causal", "masked"]


@dataclass(frozen=True)
class Block:
    """Neighboring queries, and neighboring keys of one chunk, by their positions.

    Attributes:
        queries: first position of the queries, and the position after the last.
        keys: the same for the keys.
        chunk: chunk of the keys.
        kind: whether each query reads all keys ("full"), those up to its own ("causal"), or those of its interval
            ("masked").
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    chunk: int
    kind: Kind

    @property
    def is_causal(self) -> bool:
        """Whether each query reads the keys up to its own."""
        return self.kind == "causal"


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A mask, and the attention blocks of each rank that follow from it.

    Attributes:
        mask: mask of the sequence; padded here.
        cut: distribution of the sequence over ranks.
    """

    mask: IntervalMask
    cut: SequenceCut

    def __post_init__(self) -> None:
        # A tree_map may put anything in the place of tensors; that of torch 2.9's activation checkpoints puts None.
        if isinstance(self.mask.first, Tensor) and self.mask.length != self.cut.filled_length:
            object.__setattr__(self, "mask", self.mask.filled_to(self.cut.filled_length))

    @cached_property
    def blocks(self) -> list[list[Block]]:
        """The blocks of each rank."""
        length = self.cut.chunk_length
        chunks = [(start, start + length) for start in range(0, self.cut.filled_length, length)]
        borders = {it.queries: [it] for it in self._borders(chunks)}
        masked = [whole for whole in chunks if length > _MASKED_QUERIES and _is_masked(borders[whole][0])]
        tiles = [
            (start, min(start + _MASKED_QUERIES, stop))
            for first, stop in masked
            for start in range(first, stop, _MASKED_QUERIES)
        ]
        of_tiles = self._borders(tiles) if tiles else []
        for first, stop in masked:
            borders[first, stop] = [it for it in of_tiles if first <= it.queries[0] < stop]
        found: list[list[Block]] = [[] for _ in range(self.cut.size)]
        for number, whole in enumerate(chunks):
            for of_queries in borders[whole]:
                for keys, kind in _pieces_of(of_queries):
                    found[self.cut.rank_of(number)] += self._within_chunks(of_queries.queries, keys, kind)
        return found

    @cached_property
    def needs(self) -> list[dict[int, tuple[int, int]]]:
        """For each rank, the first and the end position of the keys that it reads, by chunk."""
        needs: list[dict[int, tuple[int, int]]] = []
        for blocks in self.blocks:
            of_rank: dict[int, tuple[int, int]] = {}
            for block in blocks:
                first, stop = of_rank.get(block.chunk, block.keys)
                of_rank[block.chunk] = min(first, block.keys[0]), max(stop, block.keys[1])
            needs.append(of_rank)
        return needs

    @cached_property
    def of_one_rank(self) -> "AttentionPlan":
        """The same attention for one rank that has the whole sequence, including padding."""
        return AttentionPlan(self.mask, SequenceCut(self.cut.filled_length, 1))

    @cached_property
    def most_received(self) -> int:
        """The largest number of positions whose keys a rank gets from others."""
        ranks = range(self.cut.size)
        return max(
            sum(stop - first for source in ranks if source != rank for _, (first, stop) in self.sent(source, rank))
            for rank in ranks
        )

    def mask_of(self, block: Block, device: torch.device) -> Tensor | None:
        """The mask of a block; None for blocks of another kind.

        Masks are kept for all layers and both passes while they take little memory together.
        """
        if block.kind != "masked":
            return None
        made = self._masks.get((block, device))
        if made is None:
            queries, keys = (torch.arange(*it, device=device) for it in (block.queries, block.keys))
            made = self.mask.to(device).allowed(queries, keys)
            if sum(it.nbytes for it in self._masks.values()) + made.nbytes <= KEPT_MASK_BYTES:
                self._masks[block, device] = made
        return made

    def __getstate__(self) -> dict[str, Any]:  # behind copies and pickles
        return {name: value for name, value in self.__dict__.items() if name != "_masks"}

    @cached_property
    def _masks(self) -> dict[tuple[Block, torch.device], Tensor]:
        return {}

    def sent(self, source: int, destination: int) -> list[tuple[int, tuple[int, int]]]:
        """The chunks of `source` that `destination` reads, with first and end positions, in the source's order."""
        needs = self.needs[destination]
        return [(chunk, needs[chunk]) for chunk in self.cut.chunks_of(source) if chunk in needs]

    def _within_chunks(self, queries: tuple[int, int], keys: tuple[int, int], kind: Kind) -> Iterator[Block]:
        length = self.cut.chunk_length
        for chunk in range(keys[0] // length, (keys[1] - 1) // length + 1):
            part = max(keys[0], chunk * length), min(keys[1], (chunk + 1) * length)
            yield Block(queries, part, chunk, kind)

    def _borders(self, tiles: Sequence[tuple[int, int]]) -> list["_Borders"]:
        """Return the borders of each tile of queries, first and end; it waits for the device once."""
        first, last = self.mask.first, self.mask.last
        is_empty = first > last
        least, most = first.masked_fill(is_empty, self.mask.length), last.masked_fill(is_empty, -1)
        position = torch.arange(self.mask.length, device=first.device)
        is_own = (last == position).to(torch.int64)
        numbers = torch.stack(
            [
                torch.stack(
                    [it[:, start:stop].amin() for it in (least, most, is_own)]
                    + [it[:, start:stop].amax() for it in (least, most)]
                )
                for start, stop in tiles
            ]
        ).tolist()
        return [
            _Borders(tile, first=(n[0], n[3]), last=(n[1], n[4]), ends_at_query=bool(n[2]))
            for tile, n in zip(tiles, numbers, strict=True)
        ]


register_dataclass(AttentionPlan)  # pipeline stages send it to one another


@dataclass(frozen=True)
class _Borders:
    """The borders of the intervals of neighboring queries.

    Attributes:
        queries: first position of the queries, and the position after the last.
        first: the least and the greatest first key; the sequence's length for a query without keys.
        last: the least and the greatest last key; -1 for a query without keys.
        ends_at_query: whether each query is its own last key.
    """

    queries: tuple[int, int]
    first: tuple[int, int]
    last: tuple[int, int]
    ends_at_query: bool


def _is_masked(borders: "_Borders") -> bool:
    return any(kind == "masked" for _, kind in _pieces_of(borders))


def _pieces_of(borders: _Borders) -> list[tuple[tuple[int, int], Kind]]:
    """Runs of keys that the queries need, in order."""
    begin, end = borders.first[0], borders.last[1] + 1
    all_begin, all_end = borders.first[1], borders.last[0] + 1
    pieces: list[tuple[tuple[int, int], Kind]]
    if borders.ends_at_query and all_begin <= borders.queries[0]:
        pieces = [
            ((begin, all_begin), "masked"),
            ((all_begin, borders.queries[0]), "full"),
            (borders.queries, "causal"),
        ]
    elif all_begin < all_end:
        pieces = [((begin, all_begin), "masked"), ((all_begin, all_end), "full"), ((all_end, end), "masked")]
    else:
        pieces = [((begin, end), "masked")]
    return [(keys, kind) for keys, kind in pieces if keys[0] < keys[1]]


@leaf_of_traces
def own_part(whole: Tensor, multiple: int = 1, fill: int = 0, document_ids: Tensor | None = None) -> Tensor:
    """Return this context-parallel rank's part of a batch: `[batch, seq, ...]` to `[batch, local, ...]`.

    Args:
        whole: token ids, labels or the like, the same on all these ranks.
        multiple: divisor of each chunk's length, as for `SequenceCut`.
        fill: the value at padded positions.
        document_ids: `[batch or 1, seq]`, the document of each token in packed sequences.
    """
    rank = active_group("cp").rank_tensor(whole)
    return _cut_of(whole, multiple, document_ids).part_of(whole, rank, fill=fill)


@leaf_of_traces
def own_positions(whole: Tensor, multiple: int = 1, document_ids: Tensor | None = None) -> Tensor:
    """Return the positions of this rank's tokens in the sequence, for `[batch, seq, ...]`: `[local]`, int64."""
    return _cut_of(whole, multiple, document_ids).positions_of(active_group("cp").rank_tensor(whole))


def whole_sequence(part: Tensor, cut: SequenceCut, *, dim: int = 1) -> Tensor:
    """Gather the sequence, in order and without padding: `[..., local, ...]` to `[..., length, ...]`.

    Without gradients. Called by all context-parallel ranks.

    Args:
        part: this rank's part.
        cut: cut of the sequence.
        dim: dim of the sequence.
    """
    return cut.whole_of(all_gather(part.contiguous(), active_group("cp"), dim=dim), dim=dim)


@leaf_of_traces
def causal_plan(
    input_ids: Tensor, document_ids: Tensor | None = None, padding_mask: Tensor | None = None, multiple: int = 1
) -> AttentionPlan:
    """Return the plan of causal attention within the documents of a batch, or in padded sequences.

    Args:
        input_ids: `[batch, seq]`.
        document_ids: `[batch, seq]`, the document of each token.
        padding_mask: `[batch, seq]`, 1 for tokens and 0 for padding.
        multiple: see `own_part`.
    """
    cut = _cut_of(input_ids, multiple, document_ids)
    mask = interval_mask(
        cut.length, MaskRule(), document_ids=document_ids, padding_mask=padding_mask, device=input_ids.device
    )
    return AttentionPlan(mask, cut)


def _cut_of(whole: Tensor, multiple: int, document_ids: Tensor | None) -> SequenceCut:
    if document_ids is not None:
        return balanced_cut(document_ids, active_group("cp").size, multiple=multiple)
    return SequenceCut(whole.shape[1], active_group("cp").size, multiple=multiple)
