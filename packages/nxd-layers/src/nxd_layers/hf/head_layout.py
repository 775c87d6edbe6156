"""Which attention heads are on which rank, for any numbers of query heads and of key/value heads, and their linears.

Query head h attends to key/value head h // (query heads / key/value heads). Where the ranks do not divide the key/value
heads, each of them is copied to several ranks, or heads of zeros are added, whichever takes fewer heads. Query heads
follow their key/value head, and heads of zeros fill the gaps, so that every key/value head on a rank serves the same
number of query heads there. Where the ranks do divide them, the layout is plain: equal runs of heads.
"""

import math
from dataclasses import dataclass

from nxd_state import (
    Box,
    Group,
    ShardPiece,
    ShardSpec,
    active_group,
    set_partition_attributes,
    set_shard_spec,
    subgroup,
)
from torch import Tensor, nn

from nxd_layers.column_linear import column_linear
from nxd_layers.hf.layers import column_parallel, row_parallel, shard_of
from nxd_layers.key_value_heads import HeadCopies, KeyValueLayout
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.padding import zero_padding_gradient
from nxd_layers.sharded_linear import layer_group
from nxd_layers.shared_input import SharedInput


@dataclass(frozen=True)
class HeadLayout:
    """Where heads are.

    Attributes:
        num_heads: query heads of the model.
        num_key_value_heads: key/value heads of the model; divides `num_heads`.
        tp_size: number of ranks.
        padded_key_value_heads: key/value heads with the heads of zeros, which come last.
        copies: copies of each key/value head, over all ranks.
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
        """Key/value heads on each rank, copies and zeros included."""
        return self.padded_key_value_heads * self.copies // self.tp_size

    @property
    def heads_per_rank(self) -> int:
        """Query heads on each rank, zeros included."""
        return self.key_value_heads_per_rank * self.queries_per_copy

    @property
    def is_plain(self) -> bool:
        """Whether every rank has an equal run of the model's own heads."""
        return self.copies == 1 and self.padded_key_value_heads == self.num_key_value_heads

    def query_heads_of(self, tp_rank: int) -> list[int | None]:
        """Return the model's head behind each query head of a rank; None for a head of zeros."""
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
        """Return the layout of a key or value projection whose heads have this size."""
        padding = (self.padded_key_value_heads - self.num_key_value_heads) * head_size
        return KeyValueLayout(self.padded_key_value_heads, head_size, self.copies, self.tp_size, padding)

    def query_spec(self, logical_shape: tuple[int, ...], dim: int, tp_rank: int) -> ShardSpec:
        """Return the spec of a rank's shard of a tensor that has the query heads along `dim`."""
        head_size, rest = divmod(logical_shape[dim], self.num_heads)
        if rest:
            raise ValueError(
                f"dim {dim} of shape {logical_shape} does not hold {self.num_heads} heads of equal size; leave this "
                "layer out of the plan"
            )
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
    """Return the layout with the fewest heads per rank.

    Raises:
        ValueError: the number of key/value heads does not divide the number of query heads.
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
    """Return runs of consecutive heads: the first one's index on the rank, its number in the model, and the length."""
    runs: list[tuple[int, int, int]] = []
    for slot, head in enumerate(heads):
        if head is None:
            continue
        if runs and runs[-1][0] + runs[-1][2] == slot and runs[-1][1] + runs[-1][2] == head:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((slot, head, 1))
    return runs


class PlacedColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` without gathering, whose rows on a rank are those of a `ShardSpec`."""

    def place(self, linear: nn.Linear, weight: ShardSpec, bias: ShardSpec) -> None:
        """Take the rows of a plain linear that the specs name."""
        self._specs = [weight, bias]
        self.padded_length = weight.local_shape[0] * self.tensor_parallel_size
        self.weight = _placed(linear.weight, weight, dim=0)
        if self.bias is not None:
            self.bias = _placed(linear.bias, bias, dim=0)

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Refuse: the heads are padded already."""
        raise ValueError("this layer's heads were padded by nxd_layers.hf.parallelize; leave pad_model out")


class PlacedRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` with a split input, whose columns on a rank are those of a `ShardSpec`."""

    def place(self, linear: nn.Linear, weight: ShardSpec) -> None:
        """Take the columns of a plain linear that the spec names."""
        self._specs[0] = weight
        self.padded_length = weight.local_shape[1] * self.tensor_parallel_size
        self.weight = _placed(linear.weight, weight, dim=1)

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Refuse: the heads are padded already."""
        raise ValueError("this layer's heads were padded by nxd_layers.hf.parallelize; leave pad_model out")


class CopiedHeadsLinear(nn.Module):
    """The projection to keys or to values where several ranks hold the same head.

    The gradients of a head's copies are summed when `backward()` returns, so that the copies stay equal.

    Args:
        linear: the unsharded projection.
        layout: the layout of its heads.

    Attributes:
        weight: `[heads on this rank * head_size, in]`.
        bias: `[heads on this rank * head_size]` or None.
    """

    def __init__(self, linear: nn.Linear, layout: KeyValueLayout) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.layout = layout
        self.tensor_parallel_size = layout.tensor_parallel_size
        self.training = linear.training
        self.shared_input: SharedInput | None = None
        tp_rank = active_group("tp").rank
        self.weight = _placed(linear.weight, layout.spec(tp_rank, (linear.in_features,), ""), dim=0)
        self.bias = None if linear.bias is None else _placed(linear.bias, layout.spec(tp_rank, (), ""), dim=0)
        self.head_copies()  # makes their process group, which cannot be done while a graph is recorded

    def head_copies(self) -> HeadCopies:
        """Return the sum of gradients over the ranks that hold the same heads."""
        return HeadCopies(subgroup("tp", self.layout.sharing_ranks), self.layout, (self.layout.rows_per_rank,))

    def forward(self, input_: Tensor) -> Tensor:
        """`[..., in]` to `[..., heads on this rank * head_size]`."""
        tp_rank = layer_group(self.tensor_parallel_size).rank
        weight = zero_padding_gradient(self.weight, self.layout.spec(tp_rank, (self.in_features,), ""))
        bias = None if self.bias is None else zero_padding_gradient(self.bias, self.layout.spec(tp_rank, (), ""))
        group: Group | None = layer_group(self.tensor_parallel_size)
        if self.shared_input is not None:
            input_, group = self.shared_input.take(input_), None
        return column_linear(input_, [weight], [bias], group, copies=self.head_copies())[0]

    def extra_repr(self) -> str:
        """Sizes and copies."""
        local = tuple(self.weight.shape)
        return f"in={self.in_features}, out={self.out_features}, local={local}, copies={self.layout.copies}"


def key_value_linear(linear: nn.Linear, layout: HeadLayout) -> nn.Module:
    """Return the projection to keys or values with this layout."""
    head_size, rest = divmod(linear.out_features, layout.num_key_value_heads)
    if rest:
        raise ValueError(
            f"{linear} does not have {layout.num_key_value_heads} key/value heads of equal size; leave it out of the "
            "plan"
        )
    key_value = layout.key_value_layout(head_size)
    if layout.copies > 1:
        return CopiedHeadsLinear(linear, key_value)
    tp_rank = active_group("tp").rank
    specs = [key_value.spec(tp_rank, row_shape, "") for row_shape in ((linear.in_features,), ())]
    return _placed_column(linear, specs[0], specs[1])


def query_linear(linear: nn.Linear, layout: HeadLayout) -> ColumnParallelLinear:
    """Return a projection to queries, or to anything else that each query head has of its own, with this layout."""
    tp_rank = active_group("tp").rank
    weight = layout.query_spec((linear.out_features, linear.in_features), 0, tp_rank)
    return _placed_column(linear, weight, layout.query_spec((linear.out_features,), 0, tp_rank))


def output_linear(linear: nn.Linear, layout: HeadLayout) -> RowParallelLinear:
    """Return the projection of the heads' outputs with this layout."""
    spec = layout.query_spec((linear.out_features, linear.in_features), 1, active_group("tp").rank)
    layer = row_parallel(linear, input_is_parallel=True, pad=True, cls=PlacedRowParallelLinear)
    layer.place(linear, spec)
    return layer


def check_query_parameter(module: nn.Module, name: str, layout: HeadLayout) -> None:
    """Raise a ValueError if `place_query_parameter` would add heads of zeros: the parameter need not be zero there."""
    full = module.get_parameter(name)
    if layout.heads_per_rank * layout.tp_size != layout.num_heads:
        raise ValueError(
            f"{name} of {type(module).__name__} cannot be padded to {layout.heads_per_rank * layout.tp_size} heads; "
            f"use a tensor-parallel degree that divides {layout.num_heads}"
        )
    layout.query_spec(tuple(full.shape), 0, active_group("tp").rank)


def place_query_parameter(module: nn.Module, name: str, layout: HeadLayout) -> None:
    """Shard a parameter that has a part for each query head, along dim 0; see `check_query_parameter`."""
    full = module.get_parameter(name)
    spec = layout.query_spec(tuple(full.shape), 0, active_group("tp").rank)
    module.register_parameter(name, _placed(full, spec, dim=0))


def _placed_column(linear: nn.Linear, weight: ShardSpec, bias: ShardSpec) -> ColumnParallelLinear:
    layer = column_parallel(linear, gather_output=False, pad=True, cls=PlacedColumnParallelLinear)
    layer.place(linear, weight, bias)
    return layer


def _placed(full: Tensor, spec: ShardSpec, *, dim: int) -> nn.Parameter:
    made = nn.Parameter(shard_of(full, spec), requires_grad=full.requires_grad)
    set_shard_spec(made, spec)
    set_partition_attributes(made, partition_dim=dim, num_partitions=active_group("tp").size)
    return made
