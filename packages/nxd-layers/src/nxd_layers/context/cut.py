"""Which positions of a sequence each context-parallel rank has.

The sequence is filled up and cut into chunks of one length, as many for each rank. In the order "zigzag" rank r has the
chunks r and 2 * ranks - 1 - r, so that all ranks have as much to do under a causal mask (Grattafiori et al. 2024, "The
Llama 3 Herd of Models", section 3.3.2). In the order "contiguous" it has two neighbors. For packed documents
`balanced_cut` says which rank has which.
"""

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Order = Literal["zigzag", "contiguous"] | tuple[int, ...]

_NAMES = ("zigzag", "contiguous")


@dataclass(frozen=True)
class SequenceCut:
    """How a sequence is shared out.

    Attributes:
        length: length of the sequence before padding.
        size: context-parallel ranks.
        order: which chunks a rank has: two by name, or the rank of each chunk, where all have as many.
        multiple: divisor of a chunk's length, such as the tensor-parallel degree with sequence parallelism.

    Raises:
        ValueError: `length` is not positive, or there is no such order, or one that gives ranks unequal parts.
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
        """Of all ranks."""
        return len(self._owners)

    @property
    def chunk_length(self) -> int:
        """Positions of a chunk."""
        unit = self.num_chunks * self.multiple
        return -(-self.length // unit) * self.multiple

    @property
    def filled_length(self) -> int:
        """Positions of all chunks together, at least `length`."""
        return self.num_chunks * self.chunk_length

    @property
    def local_length(self) -> int:
        """Positions of each rank."""
        return self.filled_length // self.size

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Which chunks a rank has, in the order of its positions."""
        return tuple(chunk for chunk, owner in enumerate(self._owners) if owner == rank)

    def rank_of(self, chunk: int) -> int:
        """The rank that has a chunk."""
        return self._owners[chunk]

    def _chunks_at(self, rank: Tensor) -> Tensor:
        """`chunks_of` where the rank is data."""
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
        """A rank's positions in the whole sequence, ascending: `[local]`, int64. Those from `length` on are filling.

        Args:
            rank: in the context-parallel group; of `Group.rank_tensor`, 0-d, where ranks are to record one graph.
        """
        chunks = torch.tensor(self.chunks_of(rank)) if isinstance(rank, int) else self._chunks_at(rank)
        starts = chunks.unsqueeze(1) * self.chunk_length
        return (starts + torch.arange(self.chunk_length, device=starts.device)).flatten()

    def part_of(self, whole: Tensor, rank: int | Tensor, *, dim: int = 1, fill: float = 0) -> Tensor:
        """A rank's part of a tensor.

        Args:
            whole: `[..., length, ...]`.
            rank: as for `positions_of`.
            dim: dim of the sequence.
            fill: the value at the positions that are filled up.

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
        """The inverse of `part_of`: the sequence, without its filling.

        Args:
            parts: parts of all ranks, concatenated along `dim` in their order: `[..., filled, ...]`.
            dim: dim of the sequence.

        Returns:
            `[..., length, ...]`.
        """
        held = [number for rank in range(self.size) for number in self.chunks_of(rank)]
        chunks = dict(zip(held, parts.split(self.chunk_length, dim), strict=True))
        return torch.cat([chunks[number] for number in range(self.num_chunks)], dim).narrow(dim, 0, self.length)


# Of the sequences in the forward in flight, for hooks that must know which positions fill up; None if nothing is cut.
cut_under_way: ContextVar[SequenceCut | None] = ContextVar("cut_under_way", default=None)
