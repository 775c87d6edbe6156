"""`ColumnParallelLinear`: a linear layer whose weight is split over the tensor-parallel ranks along its outputs.

Followed by `RowParallelLinear` (Shoeybi et al. 2019) it needs one sum forward and one backward. With one rank, or
without an initialised mesh, both are `nn.Linear`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from nxd_state import Group, ShardSpec, shard_along
from torch import Tensor, nn

from nxd_layers.column_linear import column_linear
from nxd_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_linear_init,
    empty_sharded_parameter,
    fill_from_logical,
)
from nxd_layers.layer_group import layer_group
from nxd_layers.mappings import (
    GivenGroup,
    gather_from_tensor_model_parallel_region,
    parts_in_order,
    process_group_as,
)
from nxd_layers.padding.gradient import zero_padding_gradient
from nxd_layers.padding.heads import length_for_heads
from nxd_layers.padding.repartition import repartition
from nxd_layers.upstream_arguments import checked_rank_ordering, fifth_is_dtype, takes_order_too

COLUMN_ORDER = (
    "input_size",
    "output_size",
    "bias",
    "gather_output",
    "dtype",
    "device",
    "stride",
    "init_method",
    "sequence_parallel_enabled",
    "sequence_dimension",
    "keep_master_weight",
    "skip_bias_add",
    "pad",
    "pad_alignment_size_per_rank",
    "keep_padded_output",
    "tensor_model_parallel_group",
    "reduce_dtype",
    "rank_ordering",
)


class InputSharing(Protocol):
    """How layers that read the same tensor share what is computed or sent for it: see `nxd_layers.shared_input`."""

    def output(self, layer: "ColumnParallelLinear", input_: Tensor) -> Tensor:
        """The output of `layer` for this input."""


class ColumnParallelLinear(nn.Module):
    """`Y = X A + b` with `A` split by columns: each rank computes `out/tp` of the outputs.

    Args:
        input_size: length of the input's last dim.
        output_size: length of the output's last dim, over all ranks.
        bias: whether to add a bias.
        gather_output: give every rank the whole output `[..., out]`; otherwise its part `[..., out/tp]`.
        sequence_parallel_enabled: the input is split along the sequence, and is gathered first.
        dtype: of weight and bias.
        device: of weight and bias; torch's default device if None.
        stride: number of matrices fused in the weight (2 for gate and up); each is split on its own, so a rank holds
            chunks `[rank::tp]`.
        init_method: fills the whole weight in place; as in `nn.Linear` if None.
        sequence_dimension: which dim of the input is the sequence; 0 if None.
        pad: allow an `output_size` that does not divide: zeros fill up the last ranks' parts. A gathered output is cut
            to its real size; without `gather_output` the padded outputs are zero, and get no gradient.
        keep_master_weight: keep the whole initial weight as `master_weight`.
        skip_bias_add: return `(output, bias)` without adding the bias, which is whole if the output is gathered.
        pad_alignment_size_per_rank: with `pad`, each rank's part of the outputs is a multiple of it.
        keep_padded_output: leave the padding in a gathered output.
        tensor_model_parallel_group: the ranks to split over, if not the tensor-parallel ones.
        reduce_dtype: in which the input's gradient is summed over the ranks; in its own if None.
        rank_ordering: which part each rank holds; the first rank the first, and so on, if None.

    Attributes:
        weight: `[out/tp, in]`.
        bias: `[out/tp]` or None.
        padded_output_size: length that is cut into equal parts, `out` if there is no padding.
        master_weight: `[out, in]` on the CPU with `keep_master_weight`, in no state dict; otherwise None.
        shared_input: the same in layers that are called one by one with the same tensor; None for a layer by itself.

    Raises:
        ValueError: the tensor-parallel degree (times stride) does not divide `output_size`, and `pad` is False; or
            `rank_ordering` is no permutation of the ranks.

    `dtype` may also stand fifth, followed by the arguments in the order of `COLUMN_ORDER`.
    """

    @takes_order_too(COLUMN_ORDER, tells=fifth_is_dtype)
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_dimension: int | None = 0,
        pad: bool = False,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
        reduce_dtype: torch.dtype | None = None,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_linear_arguments(input_size, output_size, sequence_parallel_enabled)
        self.input_size, self.output_size = input_size, output_size
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.keep_master_weight, self.skip_bias_add = keep_master_weight, skip_bias_add
        self.keep_padded_output, self.reduce_dtype = keep_padded_output, reduce_dtype
        self.shared_input: InputSharing | None = None
        self.stride = stride
        self.init_method = init_method or default_linear_init
        group = process_group_as(tensor_model_parallel_group)
        self.given_group = None if tensor_model_parallel_group is None else group
        self.tensor_parallel_size = group.size
        self.rank_ordering = checked_rank_ordering(rank_ordering, group.size)
        multiple = group.size * stride * pad_alignment_size_per_rank
        self.padded_output_size = round_up(output_size, multiple) if pad else output_size
        self._weight_spec, self._bias_spec = self._specs_of(group.rank)
        empty = partial(empty_sharded_parameter, partition_dim=0, num_partitions=group.size, stride=stride)
        self.weight = empty(self._weight_spec, dtype=dtype, device=device)
        self.bias = empty(self._bias_spec, dtype=dtype, device=device) if bias else None
        self.reset_parameters()

    def _specs_of(self, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """Of weight and bias, on a tensor-parallel rank."""
        axis = "tp" if self.given_group is None else self.given_group.axis
        part = rank if self.rank_ordering is None else self.rank_ordering[rank]
        weight, bias = (
            shard_along(
                shape,
                0,
                rank=part,
                size=self.tensor_parallel_size,
                stride=self.stride,
                padded_length=self.padded_output_size,
                axis=axis,
            )
            for shape in [(self.output_size, self.input_size), (self.output_size,)]
        )
        return weight, bias

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
        """The ranks that the outputs are split over.

        Raises:
            RuntimeError: the mesh has changed since the layer was built.
        """
        return layer_group(self.tensor_parallel_size, self.given_group)

    def _length_for_heads(self, num_heads: int, padded_num_heads: int) -> int:
        num_parts = self.group().size * self.stride
        return length_for_heads(self.output_size, num_heads, padded_num_heads, num_parts=num_parts)

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Raise what `pad_heads` would raise, and change nothing."""
        self._length_for_heads(num_heads, padded_num_heads)

    def pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Pad `out` to what it would be if the model had `padded_num_heads`; called by `pad_model`.

        Raises:
            ValueError: that is no whole number, or not one that the tensor-parallel degree divides.
        """
        group = self.group()
        padded = self._length_for_heads(num_heads, padded_num_heads)
        if padded == self.padded_output_size:
            return
        old_specs = [self._specs_of(rank) for rank in range(group.size)]
        self.padded_output_size = padded
        self._weight_spec, self._bias_spec = self._specs_of(group.rank)
        repartition(self.weight, [weight for weight, _ in old_specs], self._weight_spec, group)
        if self.bias is not None:
            repartition(self.bias, [bias for _, bias in old_specs], self._bias_spec, group)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The parameters as the product reads them: padding gets no gradient."""
        if self.padded_output_size == self.output_size:
            return self.weight, self.bias
        bias = None if self.bias is None else zero_padding_gradient(self.bias, self._bias_spec)
        return zero_padding_gradient(self.weight, self._weight_spec), bias

    def forward(self, input_: Tensor, call: InputSharing | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[..., in]` to `[..., out/tp]`, or `[..., out]` with `gather_output`; `[seq/tp, ...]` in if split so.

        With `skip_bias_add` a tuple of it and the bias. `call` is for `column_parallel_linears`, which has the output
        already.
        """
        sharing = call or self.shared_input
        output = column_outputs(input_, [self])[0] if sharing is None else sharing.output(self, input_)
        if not self.skip_bias_add:
            return output
        bias = self.weight_and_bias()[1]
        return output, bias if bias is None or not self.gather_output else gathered_output(bias, self)

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, out={self.output_size}, local={tuple(self.weight.shape)}, "
            f"bias={self.bias is not None}, gather_output={self.gather_output}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )


def column_outputs(
    input_: Tensor, layers: Sequence[ColumnParallelLinear], *, sums_input_grad: bool = True
) -> tuple[Tensor, ...]:
    """Outputs of layers with one input, without what hooks make of them: one collective per direction for all.

    Args:
        input_: as for `ColumnParallelLinear.forward`.
        layers: alike in their sequence-parallel arguments.
        sums_input_grad: False leaves the input's gradient partial: it is summed over the ranks elsewhere.

    Raises:
        ValueError: the layers expect different inputs.
    """
    first = layers[0]
    for layer in layers[1:]:
        if _expected_input(layer) != _expected_input(first):
            raise ValueError(f"layers that share an input must expect the same one; got {first} and {layer}")
    group = first.group()
    parameters = [layer.weight_and_bias() for layer in layers]
    outputs = column_linear(
        input_,
        [weight for weight, _ in parameters],
        [None if layer.skip_bias_add else bias for layer, (_, bias) in zip(layers, parameters, strict=True)],
        group if sums_input_grad else None,
        sequence_dim=first.sequence_dimension if first.sequence_parallel_enabled else None,
        reduce_dtype=first.reduce_dtype,
    )
    return tuple(
        gathered_output(output, layer) if layer.gather_output else output
        for layer, output in zip(layers, outputs, strict=True)
    )


def gathered_output(output: Tensor, layer: ColumnParallelLinear) -> Tensor:
    """`[..., out/tp]` to `[..., out]`, without padding unless the layer keeps it."""
    whole = gather_from_tensor_model_parallel_region(output, process_group=layer.given_group)
    if layer.rank_ordering is not None:
        whole = parts_in_order(whole, [layer.rank_ordering.index(part) for part in range(layer.tensor_parallel_size)])
    is_padded = layer.padded_output_size != layer.output_size and not layer.keep_padded_output
    if layer.stride == 1:
        return whole[..., : layer.output_size] if is_padded else whole
    # Each rank's part is a chunk of every fused matrix: back to matrix after matrix.
    chunks = whole.unflatten(-1, (layer.tensor_parallel_size, layer.stride, -1))
    matrices = chunks.transpose(-3, -2).flatten(-2)
    return (matrices[..., : layer.output_size // layer.stride] if is_padded else matrices).flatten(-2)


def _expected_input(layer: ColumnParallelLinear) -> tuple[object, ...]:
    sequence_dim = layer.sequence_dimension if layer.sequence_parallel_enabled else 0
    group = (layer.tensor_parallel_size, layer.given_group, layer.reduce_dtype)
    return layer.input_size, layer.sequence_parallel_enabled, sequence_dim, *group


def round_up(length: int, multiple: int) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple


def check_linear_arguments(input_size: int, output_size: int, sequence_parallel_enabled: object) -> None:
    """Raise a ValueError for sizes and flags that no linear layer of this package takes."""
    if input_size < 1 or output_size < 1:
        raise ValueError(f"input_size={input_size}, output_size={output_size}: both must be positive")
    if not isinstance(sequence_parallel_enabled, bool):
        raise ValueError(
            f"sequence_parallel_enabled={sequence_parallel_enabled!r} is not a bool; "
            "pass dtype, device and what follows by keyword"
        )
