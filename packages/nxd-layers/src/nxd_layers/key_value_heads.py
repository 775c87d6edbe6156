"""The layout of key and value heads that are fewer than the tensor-parallel ranks, or not divisible by them.

Each head is then repeated `copies` times, one copy after the other, and the ranks take equal runs of the repeated
heads: expanded head j is logical head `j // copies`, and rank r holds expanded heads `[r * L, (r + 1) * L)`. Query
heads stay in their natural order, so a rank's key and value heads, each repeated equally often, are those of its query
heads. This module has the arithmetic of that layout and the sum of the copies' gradients; `qkv_linear` has the layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from nxd_state import Box, Group, ShardPiece, ShardSpec, all_reduce_
from torch import Tensor


def kv_size_multiplier_for(num_key_value_heads: int, tensor_parallel_size: int) -> int:
    """The fewest copies of each key and value head that give all ranks equally many heads."""
    return tensor_parallel_size // math.gcd(num_key_value_heads, tensor_parallel_size)


@dataclass(frozen=True)
class KeyValueLayout:
    """How the heads of a key or value projection lie on the ranks.

    Attributes:
        num_heads: number of heads of the model.
        head_size: rows of the weight per head.
        copies: copies of each head over all ranks; divides the tensor-parallel size.
        tensor_parallel_size: number of ranks; divides `num_heads * copies`.
        padding: number of padding rows, at the end of the last heads.
    """

    num_heads: int
    head_size: int
    copies: int
    tensor_parallel_size: int
    padding: int = 0

    @property
    def heads_per_rank(self) -> int:
        """Heads on each rank, including copies."""
        return self.num_heads * self.copies // self.tensor_parallel_size

    @property
    def rows_per_rank(self) -> int:
        """Rows on each rank, including copies."""
        return self.heads_per_rank * self.head_size

    @property
    def sharing_ranks(self) -> int:
        """Length of the runs of ranks that share heads only among themselves."""
        return self.copies // math.gcd(self.copies, self.heads_per_rank)

    def heads_of(self, tp_rank: int) -> list[int]:
        """The logical head behind each head of a rank."""
        first = tp_rank * self.heads_per_rank
        return [expanded // self.copies for expanded in range(first, first + self.heads_per_rank)]

    def spec(self, tp_rank: int, row_shape: tuple[int, ...], name: str) -> ShardSpec:
        """The spec of a rank's part `[rows_per_rank, *row_shape]` of the logical tensor `name`."""
        num_rows = self.num_heads * self.head_size - self.padding

        def box(first_row: int, num_rows: int) -> Box:
            return Box((first_row, *(0 for _ in row_shape)), (num_rows, *row_shape))

        runs: list[list[int]] = []  # of consecutive logical heads
        for head in self.heads_of(tp_rank):
            if runs and head == runs[-1][-1] + 1:
                runs[-1].append(head)
            else:
                runs.append([head])
        pieces, start = [], 0
        for run in runs:
            first, length = run[0] * self.head_size, len(run) * self.head_size
            held = min(length, num_rows - first)  # the rest is padding
            if held > 0:
                local, logical = box(start, held), box(first, held)
                pieces.append(ShardPiece(local, logical, (num_rows, *row_shape), name, self.copies))
            start += length
        return ShardSpec((self.rows_per_rank, *row_shape), tuple(pieces))


def padded_layout(
    head_counts: tuple[int, int], padded_query_heads: int, *, head_size: int, copies: int, tensor_parallel_size: int
) -> KeyValueLayout:
    """The layout of key and value heads after padding query heads at their end.

    Query head h attends to key and value head `h // (query heads / key and value heads)`. For that to stay, key and
    value heads are padded by the same ratio.
    """
    query_heads, heads = head_counts
    padded_heads, rest = divmod(heads * padded_query_heads, query_heads)
    if rest:
        raise ValueError(
            f"{query_heads} query heads cannot be padded to {padded_query_heads} with {heads} key/value heads: these "
            f"would have to be {heads * padded_query_heads / query_heads:g}, or query heads would get other key/value "
            f"heads than now; use a tensor-parallel degree that divides {query_heads}"
        )
    if padded_heads * copies % tensor_parallel_size or padded_query_heads % (padded_heads * copies):
        raise ValueError(
            f"{heads} key/value heads, padded to {padded_heads} as {query_heads} query heads are to "
            f"{padded_query_heads}, cannot be distributed over tp {tensor_parallel_size} with kv_size_multiplier="
            f"{copies}; build the layer with kv_size_multiplier="
            f"{kv_size_multiplier_for(padded_heads, tensor_parallel_size)}"
        )
    padding = (padded_heads - heads) * head_size
    return KeyValueLayout(padded_heads, head_size, copies, tensor_parallel_size, padding)


@dataclass(frozen=True)
class HeadCopies:
    """The copies of this rank's key and value heads, here and on other ranks, whose gradients are summed.

    Attributes:
        group: the ranks that share heads.
        layout: the layout of the heads.
        rows: for each weight and bias of a layer, the number of its last rows that are these heads.
    """

    group: Group
    layout: KeyValueLayout
    rows: tuple[int, ...]

    def _slots(self, like: Tensor) -> Tensor:
        """For each head of this rank, its index among the different heads of the group: `[heads]`, as data."""
        heads = self.layout.heads_per_rank
        expanded = torch.arange(heads, device=like.device)
        if self.group.size > 1:
            expanded = expanded + self.group.rank_tensor(like) * heads
        return expanded // self.layout.copies

    def start_sum(self, grads: Sequence[Tensor], dtype: torch.dtype | None = None) -> Callable[[], None]:
        """Start to add up the copies' gradients, for all tensors in one message.

        Args:
            grads: contiguous tensors `[k * heads * head_size, ...]` for any k: keys, values, or both in one. The sums
                are written to them.
            dtype: dtype of the sums; their own if None.

        Returns:
            A function that waits for the sums.
        """
        slots = self._slots(grads[0])
        heads_here, head_size = self.layout.heads_per_rank, self.layout.head_size
        by_head = [grad.view(-1, heads_here, head_size * math.prod(grad.shape[1:])) for grad in grads]
        num_different = self.group.size * heads_here // self.layout.copies
        shapes = [(heads.shape[0], num_different, heads.shape[2]) for heads in by_head]
        buffer = grads[0].new_zeros(sum(map(math.prod, shapes)), dtype=dtype)
        parts = buffer.split([math.prod(shape) for shape in shapes])
        sums = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for own_sum, heads in zip(sums, by_head, strict=True):
            own_sum.index_add_(1, slots, heads.to(own_sum.dtype))
        pending = all_reduce_(buffer, self.group, async_op=True)

        def finish() -> None:
            pending.wait()
            for heads, whole_sum in zip(by_head, sums, strict=True):
                heads.copy_(whole_sum.index_select(1, slots))

        return finish
