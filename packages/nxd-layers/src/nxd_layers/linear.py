"""Linear layers whose weight is split over the tensor-parallel ranks, along outputs or along inputs.

`ColumnParallelLinear` followed by `RowParallelLinear` (Shoeybi et al. 2019) needs one sum forward and one backward.
With one rank, or without an initialised mesh, both are `nn.Linear`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from nxd_state import ShardSpec, active_group, shard_along
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.column_linear import column_linear
from nxd_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_linear_init,
    empty_parameter,
    empty_sharded_parameter,
    fill_from_logical,
)
from nxd_layers.layer_group import layer_group
from nxd_layers.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.padding.gradient import zero_padding_gradient
from nxd_layers.padding.heads import length_for_heads
from nxd_layers.padding.repartition import repartition


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
        sequence_dimension: which dim of the input is the sequence.
        pad: allow an `output_size` that does not divide: zeros fill up the last ranks' parts. A gathered output is cut
            to its real size; without `gather_output` the padded outputs are zero, and get no gradient.

    Attributes:
        weight: `[out/tp, in]`.
        bias: `[out/tp]` or None.
        padded_output_size: length that is cut into equal parts, `out` if there is no padding.
        shared_input: the same in layers that are called one by one with the same tensor; None for a layer by itself.

    Raises:
        ValueError: the tensor-parallel degree (times stride) does not divide `output_size`, and `pad` is False.
    """

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
        sequence_dimension: int = 0,
        pad: bool = False,
    ) -> None:
        super().__init__()
        check_linear_arguments(input_size, output_size, sequence_parallel_enabled)
        self.input_size, self.output_size = input_size, output_size
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.shared_input: InputSharing | None = None
        self.stride = stride
        self.init_method = init_method or default_linear_init
        group = active_group("tp")
        self.tensor_parallel_size = group.size
        self.padded_output_size = _round_up(output_size, group.size * stride) if pad else output_size
        self._weight_spec, self._bias_spec = self._specs_of(group.rank)
        empty = partial(empty_sharded_parameter, partition_dim=0, num_partitions=group.size, stride=stride)
        self.weight = empty(self._weight_spec, dtype=dtype, device=device)
        self.bias = empty(self._bias_spec, dtype=dtype, device=device) if bias else None
        self.reset_parameters()

    def _specs_of(self, rank: int) -> tuple[ShardSpec, ShardSpec]:
        """Of weight and bias, on a tensor-parallel rank."""
        weight, bias = (
            shard_along(
                shape,
                0,
                rank=rank,
                size=self.tensor_parallel_size,
                stride=self.stride,
                padded_length=self.padded_output_size,
            )
            for shape in [(self.output_size, self.input_size), (self.output_size,)]
        )
        return weight, bias

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, the same at every tensor-parallel degree."""
        fill_from_logical(self.weight, self._weight_spec, (self.output_size, self.input_size), self.init_method)
        if self.bias is not None:
            fill_from_logical(self.bias, self._bias_spec, (self.output_size,), default_bias_init(self.input_size))

    def _length_for_heads(self, num_heads: int, padded_num_heads: int) -> int:
        num_parts = layer_group(self.tensor_parallel_size).size * self.stride
        return length_for_heads(self.output_size, num_heads, padded_num_heads, num_parts=num_parts)

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Raise what `pad_heads` would raise, and change nothing."""
        self._length_for_heads(num_heads, padded_num_heads)

    def pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Pad `out` to what it would be if the model had `padded_num_heads`; called by `pad_model`.

        Raises:
            ValueError: that is no whole number, or not one that the tensor-parallel degree divides.
        """
        group = layer_group(self.tensor_parallel_size)
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

    def forward(self, input_: Tensor, call: InputSharing | None = None) -> Tensor:
        """`[..., in]` to `[..., out/tp]`, or `[..., out]` with `gather_output`; `[seq/tp, ...]` in if split so.

        `call` is for `column_parallel_linears`, which has the output already.
        """
        sharing = call or self.shared_input
        return column_outputs(input_, [self])[0] if sharing is None else sharing.output(self, input_)

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
    group = layer_group(first.tensor_parallel_size)
    parameters = [layer.weight_and_bias() for layer in layers]
    outputs = column_linear(
        input_,
        [weight for weight, _ in parameters],
        [bias for _, bias in parameters],
        group if sums_input_grad else None,
        sequence_dim=first.sequence_dimension if first.sequence_parallel_enabled else None,
    )
    return tuple(
        gathered_output(output, layer) if layer.gather_output else output
        for layer, output in zip(layers, outputs, strict=True)
    )


def gathered_output(output: Tensor, layer: ColumnParallelLinear) -> Tensor:
    """`[..., out/tp]` to `[..., out]`, without padding."""
    whole = gather_from_tensor_model_parallel_region(output)
    is_padded = layer.padded_output_size != layer.output_size
    if layer.stride == 1:
        return whole[..., : layer.output_size] if is_padded else whole
    # Each rank's part is a chunk of every fused matrix: back to matrix after matrix.
    chunks = whole.unflatten(-1, (layer.tensor_parallel_size, layer.stride, -1))
    matrices = chunks.transpose(-3, -2).flatten(-2)
    return (matrices[..., : layer.output_size // layer.stride] if is_padded else matrices).flatten(-2)


def _expected_input(layer: ColumnParallelLinear) -> tuple[int, bool, int, int]:
    sequence_dim = layer.sequence_dimension if layer.sequence_parallel_enabled else 0
    return layer.input_size, layer.sequence_parallel_enabled, sequence_dim, layer.tensor_parallel_size


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
        init_method: fills the whole weight in place; as in `nn.Linear` if None.
        sequence_dimension: which dim of the output is the sequence.
        pad: allow an `input_size` that does not divide: zeros fill up the last ranks' parts. A whole input is padded
            here; one that is parallel comes padded, as a column-parallel layer with `pad` leaves it.

    Attributes:
        weight: `[out, in/tp]`.
        bias: `[out]` or None, whole on every rank.
        padded_input_size: length that is cut into equal parts, `in` if there is no padding.

    Raises:
        ValueError: the tensor-parallel degree does not divide `input_size`, and `pad` is False; or sequence
            parallelism with an input that is not split.
    """

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
        init_method: InitMethod | None = None,
        sequence_dimension: int = 0,
        pad: bool = False,
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
        self.sequence_dimension = sequence_dimension
        self.init_method = init_method or default_linear_init
        target = None if isinstance(device, bool) else device
        group = active_group("tp")
        self.tensor_parallel_size = group.size
        self.padded_input_size = _round_up(input_size, group.size) if pad else input_size
        self._weight_spec = self._weight_spec_of(group.rank)
        self._bias_spec = shard_along((output_size,), 0, rank=0, size=1)
        self.weight = empty_sharded_parameter(
            self._weight_spec, partition_dim=1, num_partitions=group.size, dtype=dtype, device=target
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
            rank=rank,
            size=self.tensor_parallel_size,
            padded_length=self.padded_input_size,
        )

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, the same at every tensor-parallel degree."""
        fill_from_logical(self.weight, self._weight_spec, (self.output_size, self.input_size), self.init_method)
        if self.bias is not None:
            fill_from_logical(self.bias, self._bias_spec, (self.output_size,), default_bias_init(self.input_size))

    def _length_for_heads(self, num_heads: int, padded_num_heads: int) -> int:
        num_parts = layer_group(self.tensor_parallel_size).size
        return length_for_heads(self.input_size, num_heads, padded_num_heads, num_parts=num_parts)

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Raise what `pad_heads` would raise, and change nothing."""
        self._length_for_heads(num_heads, padded_num_heads)

    def pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Pad `in` to what it would be if the model had `padded_num_heads`; called by `pad_model`.

        Raises:
            ValueError: that is no whole number, or not one that the tensor-parallel degree divides.
        """
        group = layer_group(self.tensor_parallel_size)
        padded = self._length_for_heads(num_heads, padded_num_heads)
        if padded == self.padded_input_size:
            return
        old_specs = [self._weight_spec_of(rank) for rank in range(group.size)]
        self.padded_input_size = padded
        self._weight_spec = self._weight_spec_of(group.rank)
        repartition(self.weight, old_specs, self._weight_spec, group)

    def forward(self, input_: Tensor) -> Tensor:
        """`[..., in]` (`[..., in/tp]` if parallel) to `[..., out]`; `[seq/tp, ..., out]` if sequence parallel."""
        group = layer_group(self.tensor_parallel_size)
        padding = self.padded_input_size - self.input_size
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(F.pad(input_, (0, padding)) if padding else input_)
        if group.size == 1:
            return F.linear(input_, self.weight, self.bias)
        partial = F.linear(input_, zero_padding_gradient(self.weight, self._weight_spec) if padding else self.weight)
        if self.sequence_parallel_enabled:
            output = reduce_scatter_to_sequence_parallel_region(partial, self.sequence_dimension)
        else:
            output = reduce_from_tensor_model_parallel_region_(partial)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, out={self.output_size}, local={tuple(self.weight.shape)}, "
            f"bias={self.bias is not None}, input_is_parallel={self.input_is_parallel}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )


def _round_up(length: int, multiple: int) -> int:
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
