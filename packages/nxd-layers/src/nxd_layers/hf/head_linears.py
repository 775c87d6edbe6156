"""The layers of attention modules whose heads are copied or padded: how a plan shards each, and its parallel linear."""

from collections.abc import Mapping
from functools import partial

from nxd_state import Group, ShardSpec, active_group, set_partition_attributes, set_shard_spec, subgroup
from torch import Tensor, nn

from nxd_layers.column_linear import column_linear
from nxd_layers.hf.head_layout import HeadLayout
from nxd_layers.hf.layers import column_parallel, row_parallel, shard_of
from nxd_layers.hf.plans import join_path
from nxd_layers.hf.styles import Apply, Target, replace_linear
from nxd_layers.key_value_heads import HeadCopies, KeyValueLayout
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.padding import zero_padding_gradient
from nxd_layers.sharded_linear import layer_group
from nxd_layers.shared_input import SharedInput

_KEY_VALUE_LAYERS = ("k_proj", "v_proj")


def shard_heads(target: Target, styles: Mapping[str, str], layout: HeadLayout) -> dict[str, Apply]:
    """Check the layers of an attention module whose heads are not in equal runs, and return how to shard each of them.

    Returns:
        By path, the function that shards it. Full norms of single heads are left to their styles.
    """
    own = {path: style for path, style in styles.items() if path.startswith(join_path(target.path, ""))}
    # In the model's order, so that all ranks raise the same error.
    placed = [path for path, style in own.items() if style not in ("replicated_with_grad_allreduce", "local_params")]
    if not any(own[path] == "rowwise" for path in placed):
        raise ValueError(_cannot_place(target.path, "without a rowwise layer of its own", layout))
    return {path: _placement(Target(target.model, path), target.module, own[path], layout) for path in placed}


def _placement(part: Target, attention: nn.Module, style: str, layout: HeadLayout) -> Apply:
    if style == "rowwise" and not part.is_parameter:
        return replace_linear(part, partial(output_linear, layout=layout))
    if style != "colwise" or part.parent is not attention:
        raise ValueError(_cannot_place(part.path, style, layout))
    if part.is_parameter:
        check_query_parameter(part.parent, part.name, layout)
        return partial(place_query_parameter, part.parent, part.name, layout)
    make = key_value_linear if part.name in _KEY_VALUE_LAYERS else query_linear
    return replace_linear(part, partial(make, layout=layout))


def _cannot_place(path: str, style: str, layout: HeadLayout) -> str:
    return (
        f"{path} ({style}): tensor_model_parallel_size={layout.tp_size} does not divide {layout.num_heads} query or "
        f"{layout.num_key_value_heads} key/value heads, and this layer cannot be padded or copied; use a degree that "
        "divides both"
    )


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
