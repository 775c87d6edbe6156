"""Which positions of a sequence each context-parallel rank has.

The sequence is padded and cut into chunks of equal length, equally many for each rank. In the order "zigzag" rank r has
the chunks r and 2 * ranks - 1 - r, which balances the work of a causal mask (Grattafiori et al. 2024, "The Llama 3 Herd
of Models", section 3.3.2). In the order "contiguous" it has two neighboring chunks.

For packed documents zigzag is not balanced, since a position's work is the number of keys before it in its document.
`balanced_cut` makes more chunks and assigns them, the most work first, to the rank with the least work so far (Graham
1969, "Bounds on Multiprocessing Timing Anomalies").
"""

from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Order = Literal["zigzag", "contiguous"] | tuple[int, ...]

_NAMES = ("zigzag", "contiguous")


@dataclass(frozen=True)
class SequenceCut:
    """How a sequence is split over the context-parallel ranks.

    Attributes:
        length: length of the sequence before padding.
        size: context-parallel ranks.
        order: which chunks a rank has: the name of an order, or the rank of each chunk, equally many for each rank.
        multiple: divisor of a chunk's length, such as the tensor-parallel degree with sequence parallelism.

    Raises:
        ValueError: `length` is not positive, or the order is unknown or gives ranks unequal parts.
    """

    length: int
    size: int
    order: Order = "zigzag"
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a sequence of {self.length} positions cannot be cut; pass at least one")
        if isinstance(self.order, str) and self.order not in _NAMES:
            raise ValueError(f"unknown order={self.order!r}; use one of {', '.join(_NAMES)}, or the rank of each chunk")
        counts = Counter(self._owners)
        if set(counts) != set(range(self.size)) or len(set(counts.values())) > 1:
            raise ValueError(f"order={self.order} must give each of {self.size} ranks the same number of chunks")

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all ranks."""
        return len(self._owners)

    @property
    def chunk_length(self) -> int:
        """Number of positions in a chunk."""
        unit = self.num_chunks * self.multiple
        return -(-self.length // unit) * self.multiple

    @property
    def filled_length(self) -> int:
        """Number of positions in all chunks, at least `length`."""
        return self.num_chunks * self.chunk_length

    @property
    def local_length(self) -> int:
        """Number of positions on each rank."""
        return self.filled_length // self.size

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of its positions."""
        return tuple(chunk for chunk, owner in enumerate(self._owners) if owner == rank)

    def rank_of(self, chunk: int) -> int:
        """The rank that has a chunk."""
        return self._owners[chunk]

    def _chunks_at(self, rank: Tensor) -> Tensor:
        """`chunks_of` for a rank that is data."""
        of_ranks = torch.tensor([self.chunks_of(number) for number in range(self.size)], device=rank.device)
        return of_ranks.index_select(0, rank.view(1)).squeeze(0)

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        if self.order == "zigzag":
            return *range(self.size), *reversed(range(self.size))
        if self.order == "contiguous":
            return tuple(chunk // 2 for chunk in range(2 * self.size))
        return self.order

    def positions_of(self, rank: int | Tensor) -> Tensor:
        """A rank's positions in the whole sequence, ascending: `[local]`, int64. Those from `length` on are padding.

        Args:
            rank: rank in the context-parallel group; a `Group.rank_tensor`, 0-d, if all ranks must record one graph.
        """
        chunks = torch.tensor(self.chunks_of(rank)) if isinstance(rank, int) else self._chunks_at(rank)
        starts = chunks.unsqueeze(1) * self.chunk_length
        return (starts + torch.arange(self.chunk_length, device=starts.device)).flatten()

    def part_of(self, whole: Tensor, rank: int | Tensor, *, dim: int = 1, fill: float = 0) -> Tensor:
        """A rank's part of a tensor.

        Args:
            whole: `[..., length, ...]`.
            rank: see `positions_of`.
            dim: dim of the sequence.
            fill: the value at padded positions.

        Returns:
            `[..., local, ...]`, contiguous.

        Raises:
            ValueError: the tensor has another length.
        """
        dim = dim % whole.dim()
        if whole.shape[dim] != self.length:
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} has {whole.shape[dim]} positions along dim {dim}, but the "
                f"sequence has {self.length}"
            )
        padding = (0, 0) * (whole.dim() - 1 - dim) + (0, self.filled_length - self.length)
        filled = F.pad(whole, padding, value=fill)
        if isinstance(rank, int):
            chunks = filled.split(self.chunk_length, dim)
            return torch.cat([chunks[number] for number in self.chunks_of(rank)], dim)
        of_rank = filled.unflatten(dim, (self.num_chunks, self.chunk_length)).index_select(dim, self._chunks_at(rank))
        return of_rank.flatten(dim, dim + 1)

    def whole_of(self, parts: Tensor, *, dim: int = 1) -> Tensor:
        """The inverse of `part_of`: the sequence, without its padding.

        Args:
            parts: parts of all ranks, concatenated along `dim` in their order: `[..., filled, ...]`.
            dim: dim of the sequence.

        Returns:
            `[..., length, ...]`.
        """
        held = [number for rank in range(self.size) for number in self.chunks_of(rank)]
        chunks = dict(zip(held, parts.split(self.chunk_length, dim), strict=True))
        return torch.cat([chunks[number] for number in range(self.num_chunks)], dim).narrow(dim, 0, self.length)


# The cut of the forward in flight, for hooks that must know which positions are padding; None if nothing is cut.
cut_under_way: ContextVar[SequenceCut | None] = ContextVar("cut_under_way", default=None)


_CHUNKS_OF_A_RANK = (2, 4, 8, 16)  # more of them even out better, and make smaller blocks
_SHORTEST_CHUNK = 128  # positions; smaller blocks are mostly overhead
_EVEN_ENOUGH = 1.05  # times the mean


def balanced_cut(document_ids: Tensor, size: int, *, multiple: int = 1) -> SequenceCut:
    """Return a balanced cut of packed documents: zigzag if it is balanced, else with as few chunks as possible.

    Args:
        document_ids: integer `[batch or 1, seq]`, the document of each token, the same on all ranks. Tokens of a
            document are neighbors.
        size: number of context-parallel ranks.
        multiple: see `SequenceCut`.
    """
    work = _keys_before(document_ids).cpu()  # the one wait for the device
    found: list[tuple[float, SequenceCut]] = []
    for cut in _candidates(work, size, multiple):
        found.append((_unevenness(work, cut), cut))
        if found[-1][0] <= _EVEN_ENOUGH:
            return cut
    return min(found, key=lambda it: it[0])[1]


def _candidates(work: Tensor, size: int, multiple: int) -> Iterator[SequenceCut]:
    yield SequenceCut(len(work), size, multiple=multiple)
    for chunks in _CHUNKS_OF_A_RANK:
        cut = SequenceCut(len(work), size, tuple(range(size)) * chunks, multiple)
        if chunks == 2 or cut.chunk_length >= _SHORTEST_CHUNK:
            yield replace(cut, order=_assigned(_sums(work, cut), size))


def _unevenness(work: Tensor, cut: SequenceCut) -> float:
    """The largest work of a rank, as a multiple of the mean."""
    of_chunks = _sums(work, cut)
    most = max(sum(of_chunks[chunk] for chunk in cut.chunks_of(rank)) for rank in range(cut.size))
    return most * cut.size / sum(of_chunks)


def _keys_before(document_ids: Tensor) -> Tensor:
    """The number of keys that the queries at each position read under a causal mask, over all rows: `[seq]`."""
    position = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begin = position.where(starts, 0).cummax(dim=1).values
    return (position + 1 - begin).sum(dim=0)


def _sums(work: Tensor, cut: SequenceCut) -> list[int]:
    filled = torch.cat([work, work.new_zeros(cut.filled_length - cut.length)])
    sums: list[int] = filled.view(cut.num_chunks, -1).sum(dim=1).tolist()
    return sums


def _assigned(of_chunks: list[int], size: int) -> tuple[int, ...]:
    """Return the rank of each chunk; all ranks get equally many."""
    owners, loads, room = [0] * len(of_chunks), [0] * size, [len(of_chunks) // size] * size
    for chunk in sorted(range(len(of_chunks)), key=lambda it: -of_chunks[it]):
        owner = min((rank for rank in range(size) if room[rank]), key=lambda rank: loads[rank])
        owners[chunk] = owner
        loads[owner] += of_chunks[chunk]
        room[owner] -= 1
    return tuple(owners)
