"""Which attention heads lie on which rank, for any numbers of query and of key and value heads.

Query head h attends to key and value head h // (query heads / key and value heads). Where the ranks do not divide the
key and value heads, each is repeated on several ranks, or heads of zeros are added, whichever takes fewer heads; query
heads follow their key and value head, and heads of zeros fill up what is missing, so that every key and value head here
serves equally many query heads here. Without such need the layout is the plain one: equal runs of heads.
"""

import math
from dataclasses import dataclass

from nxd_state import Box, ShardPiece, ShardSpec

from nxd_layers.key_value_heads import KeyValueLayout


@dataclass(frozen=True)
class HeadLayout:
    """Where heads lie.

    Attributes:
        num_heads: query heads of the model.
        num_key_value_heads: key and value heads of the model; divide `num_heads`.
        tp_size: number of ranks.
        padded_key_value_heads: with heads of zeros at the end.
        copies: of each of these, over all ranks.
        queries_per_copy: query heads, zeros included, that each copy serves.
    """

    num_heads: int
    num_key_value_heads: int
    tp_size: int
    padded_key_value_heads: int
    copies: int
    queries_per_copy: int

    @property
    def key_value_heads_per_rank(self) -> int:
        """Copies and zeros included."""
        return self.padded_key_value_heads * self.copies // self.tp_size

    @property
    def heads_per_rank(self) -> int:
        """Query heads, zeros included."""
        return self.key_value_heads_per_rank * self.queries_per_copy

    @property
    def is_plain(self) -> bool:
        """Whether every rank has an equal run of the model's own heads."""
        return self.copies == 1 and self.padded_key_value_heads == self.num_key_value_heads

    def query_heads_of(self, tp_rank: int) -> list[int | None]:
        """The model's head behind each query head of a rank; None for one of zeros."""
        group = self.num_heads // self.num_key_value_heads
        heads: list[int | None] = []
        first = tp_rank * self.key_value_heads_per_rank
        for expanded in range(first, first + self.key_value_heads_per_rank):
            key_value_head, copy = divmod(expanded, self.copies)
            for index in range(copy * self.queries_per_copy, (copy + 1) * self.queries_per_copy):
                is_real = index < group and key_value_head < self.num_key_value_heads
                heads.append(key_value_head * group + index if is_real else None)
        return heads

    def key_value_layout(self, head_size: int) -> KeyValueLayout:
        """Of a key or value projection with heads of this size."""
        padding = (self.padded_key_value_heads - self.num_key_value_heads) * head_size
        return KeyValueLayout(self.padded_key_value_heads, head_size, self.copies, self.tp_size, padding)

    def query_spec(self, logical_shape: tuple[int, ...], dim: int, tp_rank: int) -> ShardSpec:
        """How a rank's part of a tensor with the query heads along `dim` maps to the whole one.

        Raises:
            ValueError: the dim is not one of whole heads.
        """
        head_size, rest = divmod(logical_shape[dim], self.num_heads)
        if rest:
            raise ValueError(f"dim {dim} of shape {logical_shape} is not {self.num_heads} whole heads")
        heads = self.query_heads_of(tp_rank)

        def box(first: int, length: int) -> Box:
            offset, shape = [0] * len(logical_shape), list(logical_shape)
            offset[dim], shape[dim] = first * head_size, length * head_size
            return Box(tuple(offset), tuple(shape))

        pieces = tuple(
            ShardPiece(box(slot, length), box(head, length), logical_shape) for slot, head, length in _runs(heads)
        )
        return ShardSpec(box(0, len(heads)).shape, pieces)


def head_layout(num_heads: int, num_key_value_heads: int, tp_size: int) -> HeadLayout:
    """The layout with the fewest heads per rank.

    Raises:
        ValueError: the key and value heads do not divide the query heads.
    """
    group, rest = divmod(num_heads, num_key_value_heads)
    if rest:
        raise ValueError(f"{num_key_value_heads} key/value heads do not divide {num_heads} query heads")
    padded_to = range(num_key_value_heads, num_key_value_heads + tp_size)
    layouts = []
    for padded in padded_to:
        copies = tp_size // math.gcd(padded, tp_size)
        layouts.append(HeadLayout(num_heads, num_key_value_heads, tp_size, padded, copies, -(-group // copies)))
    return min(layouts, key=lambda layout: (layout.heads_per_rank, layout.key_value_heads_per_rank))


def _runs(heads: list[int | None]) -> list[tuple[int, int, int]]:
    """Runs of consecutive heads: index of the first, which head it is, and how many."""
    runs: list[tuple[int, int, int]] = []
    for slot, head in enumerate(heads):
        if head is None:
            continue
        if runs and runs[-1][0] + runs[-1][2] == slot and runs[-1][1] + runs[-1][2] == head:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((slot, head, 1))
    return runs
