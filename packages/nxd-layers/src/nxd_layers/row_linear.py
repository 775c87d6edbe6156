"""`RowParallelLinear`: a linear layer whose weight is split over the tensor-parallel ranks along its inputs."""

from collections.abc import Sequence

import torch
from nxd_state import Group, ShardSpec, shard_along
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_linear_init,
    empty_parameter,
    empty_sharded_parameter,
    fill_from_logical,
)
from nxd_layers.layer_group import layer_group
from nxd_layers.linear import check_linear_arguments, round_up
from nxd_layers.mappings import (
    GivenGroup,
    parts_in_order,
    process_group_as,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.padding.gradient import zero_padding_gradient
from nxd_layers.padding.heads import length_for_heads
from nxd_layers.padding.repartition import repartition
from nxd_layers.upstream_arguments import (
    checked_rank_ordering,
    fifth_is_dtype,
    say_without_effect,
    takes_order_too,
)

ROW_ORDER = (
    "input_size",
    "output_size",
    "bias",
    "input_is_parallel",
    "dtype",
    "device",
    "stride",
    "init_method",
    "sequence_parallel_enabled",
    "sequence_dimension",
    "keep_master_weight",
    "skip_bias_add",
    "pad",
    "reduce_output",
    "tensor_model_parallel_group",
    "reduce_dtype",
    "tile_cc",
    "rank_ordering",
)


class RowParallelLinear(nn.Module):
    """`Y = X A + b` with `A` split by rows: each rank multiplies `in/tp` of the inputs, and the products are summed.

    Args:
        input_size: length of the input's last dim, over all ranks.
        output_size: length of the output's last dim.
        bias: whether to add a bias (once, after the sum).
        input_is_parallel: the input is this rank's part `[..., in/tp]` already, as a column-parallel layer leaves it.
        sequence_parallel_enabled: leave the output split along the sequence; needs `input_is_parallel`.
        dtype: of weight and bias.
        device: of weight and bias; torch's default device if None (or False, as one document spells it).
        stride: number of matrices fused along the inputs; each is split on its own, so a rank holds chunks
            `[rank::tp]`.
        init_method: fills the whole weight in place; as in `nn.Linear` if None.
        sequence_dimension: which dim of the output is the sequence; 0 if None.
        pad: allow an `input_size` that does not divide: zeros fill up the last ranks' parts. A whole input is padded
            here; one that is parallel comes padded, as a column-parallel layer with `pad` leaves it.
        keep_master_weight: keep the whole initial weight as `master_weight`.
        skip_bias_add: return `(output, bias)` without adding the bias.
        reduce_output: False leaves the products of the ranks unsummed. Each rank adds the whole bias, if there is one:
            leave it out where the outputs are summed later.
        tensor_model_parallel_group: the ranks to split over, if not the tensor-parallel ones.
        reduce_dtype: in which the products are summed over the ranks; in their own if None. The output has theirs.
        tile_cc: taken for scripts that give it; it asked another compiler to cut collectives into pieces.
        rank_ordering: which part each rank holds; the first rank the first, and so on, if None.

    Attributes:
        weight: `[out, in/tp]`.
        bias: `[out]` or None, whole on every rank.
        padded_input_size: length that is cut into equal parts, `in` if there is no padding.
        master_weight: `[out, in]` on the CPU with `keep_master_weight`, in no state dict; otherwise None.

    Raises:
        ValueError: the tensor-parallel degree (times stride) does not divide `input_size`, and `pad` is False;
            sequence parallelism with an input that is not split; or `rank_ordering` is no permutation of the ranks.

    `dtype` may also stand fifth, followed by the arguments in the order of `ROW_ORDER`.
    """

    @takes_order_too(ROW_ORDER, tells=fifth_is_dtype)
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | bool | None = None,
        *,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_dimension: int | None = 0,
        pad: bool = False,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: GivenGroup = None,
        reduce_dtype: torch.dtype | None = None,
        tile_cc: bool = False,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_linear_arguments(input_size, output_size, sequence_parallel_enabled)
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError(
                "sequence_parallel_enabled=True needs input_is_parallel=True: a sequence-parallel region ends at a "
                "row-parallel layer whose input a column-parallel layer has split"
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.stride = stride
        self.keep_master_weight, self.skip_bias_add = keep_master_weight, skip_bias_add
        self.reduce_output, self.reduce_dtype = reduce_output, reduce_dtype
        self.init_method = init_method or default_linear_init
        target = None if isinstance(device, bool) else device
        group = process_group_as(tensor_model_parallel_group)
        self.given_group = None if tensor_model_parallel_group is None else group
        self.tensor_parallel_size = group.size
        self.rank_ordering = checked_rank_ordering(rank_ordering, group.size)
        if tile_cc:
            say_without_effect("tile_cc", "this library chooses how collectives are cut")
        self.padded_input_size = round_up(input_size, group.size * stride) if pad else input_size
        self._weight_spec = self._weight_spec_of(group.rank)
        self._bias_spec = shard_along((output_size,), 0, rank=0, size=1)
        self.weight = empty_sharded_parameter(
            self._weight_spec, partition_dim=1, num_partitions=group.size, stride=stride, dtype=dtype, device=target
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter((output_size,), dtype, target)
            # Added to a part of the sequence, so its gradient is partial and must be summed over the ranks.
            self.bias.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]
        self.reset_parameters()

    def _weight_spec_of(self, rank: int) -> ShardSpec:
        return shard_along(
            (self.output_size, self.input_size),
            1,
            rank=rank if self.rank_ordering is None else self.rank_ordering[rank],
            size=self.tensor_parallel_size,
            stride=self.stride,
            padded_length=self.padded_input_size,
            axis="tp" if self.given_group is None else self.given_group.axis,
        )

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, the same at every tensor-parallel degree."""
        whole = fill_from_logical(self.weight, self._weight_spec, (self.output_size, self.input_size), self.init_method)
        self.master_weight = whole.to(self.weight.dtype) if self.keep_master_weight and whole is not None else None
        if self.bias is not None:
            fill_from_logical(self.bias, self._bias_spec, (self.output_size,), default_bias_init(self.input_size))

    def init_weight_cpu(self) -> None:
        """`reset_parameters`, under the name that `param_init_fn` of scripts for NeuronX Distributed calls."""
        self.reset_parameters()

    def group(self) -> Group:
        """The ranks that the inputs are split over.

        Raises:
            RuntimeError: the mesh has changed since the layer was built.
        """
        return layer_group(self.tensor_parallel_size, self.given_group)

    def _length_for_heads(self, num_heads: int, padded_num_heads: int) -> int:
        num_parts = self.group().size * self.stride
        return length_for_heads(self.input_size, num_heads, padded_num_heads, num_parts=num_parts)

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Raise what `pad_heads` would raise, and change nothing."""
        self._length_for_heads(num_heads, padded_num_heads)

    def pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Pad `in` to what it would be if the model had `padded_num_heads`; called by `pad_model`.

        Raises:
            ValueError: that is no whole number, or not one that the tensor-parallel degree divides.
        """
        group = self.group()
        padded = self._length_for_heads(num_heads, padded_num_heads)
        if padded == self.padded_input_size:
            return
        old_specs = [self._weight_spec_of(rank) for rank in range(group.size)]
        self.padded_input_size = padded
        self._weight_spec = self._weight_spec_of(group.rank)
        repartition(self.weight, old_specs, self._weight_spec, group)

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[..., in]` (`[..., in/tp]` if parallel) to `[..., out]`; `[seq/tp, ..., out]` if sequence parallel.

        With `skip_bias_add` a tuple of it and the bias.
        """
        group = self.group()
        added = None if self.skip_bias_add else self.bias
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(self._in_rank_order(input_), process_group=group)
        if group.size == 1:
            output = F.linear(input_, self.weight, added)
        else:
            padded = self.padded_input_size != self.input_size
            weight = zero_padding_gradient(self.weight, self._weight_spec) if padded else self.weight
            output = self._reduced(F.linear(input_, weight), group)
            output = output if added is None else output + added.to(output.dtype)
        return (output, self.bias) if self.skip_bias_add else output

    def _in_rank_order(self, whole: Tensor) -> Tensor:
        """A whole input, padded, so that equal parts of it are those of the ranks."""
        if padding := self.padded_input_size - self.input_size:
            by_matrix = whole.unflatten(-1, (self.stride, -1))
            whole = F.pad(by_matrix, (0, padding // self.stride)).flatten(-2)
        if self.stride > 1:
            whole = whole.unflatten(-1, (self.stride, self.tensor_parallel_size, -1)).transpose(-3, -2).flatten(-3)
        return whole if self.rank_ordering is None else parts_in_order(whole, self.rank_ordering)

    def _reduced(self, partial: Tensor, group: Group) -> Tensor:
        if not self.reduce_output:
            return partial
        dtype = partial.dtype
        wide = partial if self.reduce_dtype is None else partial.to(self.reduce_dtype)
        if self.sequence_parallel_enabled:
            reduced = reduce_scatter_to_sequence_parallel_region(wide, self.sequence_dimension, group)
        else:
            reduced = reduce_from_tensor_model_parallel_region_(wide, group)
        return reduced.to(dtype)

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, out={self.output_size}, local={tuple(self.weight.shape)}, "
            f"bias={self.bias is not None}, input_is_parallel={self.input_is_parallel}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )
