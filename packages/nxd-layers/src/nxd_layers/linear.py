"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers whose weight is split over the tensor-parallel ranks.

A column-parallel layer followed by a row-parallel one needs one sum forward and one backward (Shoeybi et al. 2019).
With one rank, or without an initialized mesh, both are `nn.Linear`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from nxd_state import Group
from nxd_state.parameter_marks import mark_sequence_parallel
from torch import Tensor
from torch.nn import functional as F

from nxd_layers.column_linear import column_linear
from nxd_layers.initialization import InitMethod, default_linear_init
from nxd_layers.mappings import (
    GivenGroup,
    gather_from_tensor_model_parallel_region,
    parts_in_order,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.sharded_linear import ShardedLinear


class InputSharing(Protocol):
    """How layers that read the same tensor share what is computed or sent for it: see `nxd_layers.shared_input`."""

    def output(self, layer: "ColumnParallelLinear", input_: Tensor) -> Tensor:
        """Return the output of `layer` for this input."""


class ColumnParallelLinear(ShardedLinear):
    """`Y = X A + b` with `A` split by columns: each rank computes `out/tp` of the outputs.

    Args:
        input_size: length of the input's last dim.
        output_size: length of the output's last dim, over all ranks.
        bias: whether to add a bias.
        gather_output: give every rank the whole output `[..., out]`; otherwise its part `[..., out/tp]`.
        sequence_parallel_enabled: the input is split along the sequence, and is gathered first.
        dtype: dtype of weight and bias.
        device: device of weight and bias; None: torch's default device.
        stride: number of matrices fused in the weight (2 for gate and up); each is split separately, so a rank holds
            chunks `[rank::tp]`.
        init_method: fills the whole weight in place; None: like `nn.Linear`.
        sequence_dimension: the dim of the input that is the sequence; None: 0.
        pad: allow an `output_size` that does not divide: zeros fill up the last ranks' parts. A gathered output is cut
            to its real size; without `gather_output` the padded outputs are zero and get no gradient.
        keep_master_weight: keep the whole initial weight as `master_weight`.
        skip_bias_add: return `(output, bias)` without adding the bias, which is whole if the output is gathered.
        pad_alignment_size_per_rank: with `pad`, each rank's part of the outputs is a multiple of it.
        keep_padded_output: leave the padding in a gathered output.
        tensor_model_parallel_group: the ranks to split over; None: the tensor-parallel ranks.
        reduce_dtype: dtype in which the input's gradient is summed over the ranks; None: its own.
        rank_ordering: the part that each rank holds; None: rank r holds part r.

    Attributes:
        weight: `[out/tp, in]`.
        bias: `[out/tp]` or None.
        shared_input: an object that layers called one by one with the same tensor have in common; None for a single
            layer.

    Raises:
        ValueError: the tensor-parallel degree (times stride) does not divide `output_size`, and `pad` is False; or
            `rank_ordering` is not a permutation of the ranks.
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
        check_linear_arguments(input_size, output_size, sequence_parallel_enabled)
        super().__init__(
            (output_size, input_size),
            partition_dim=0,
            init_method=init_method or default_linear_init,
            num_matrices=stride,
            pad_multiple=pad_alignment_size_per_rank if pad else None,
            keep_master_weight=keep_master_weight,
            tensor_model_parallel_group=tensor_model_parallel_group,
            rank_ordering=rank_ordering,
        )
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.keep_padded_output, self.reduce_dtype = keep_padded_output, reduce_dtype
        self.shared_input: InputSharing | None = None
        self._add_parameters(dtype, device, bias=bias)

    @property
    def padded_output_size(self) -> int:
        """Length of the outputs over all ranks, including padding."""
        return self.padded_length

    def forward(self, input_: Tensor, call: InputSharing | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[..., in]` to `[..., out/tp]`, or to `[..., out]` with `gather_output`; the input is `[seq/tp, ...]` with
        sequence parallelism.

        With `skip_bias_add` the result is a tuple of the output and the bias. `call` is passed by
        `column_parallel_linears`, which has already computed the output.
        """
        sharing = call or self.shared_input
        output = column_outputs(input_, [self])[0] if sharing is None else sharing.output(self, input_)
        if not self.skip_bias_add:
            return output
        bias = self.read_bias()
        return output, bias if bias is None or not self.gather_output else gathered_output(bias, self)

    def features(self) -> dict[str, str]:
        """See `ShardedLinear.features`."""
        names = ("gather_output", "sequence_parallel_enabled", "skip_bias_add", "keep_padded_output", "reduce_dtype")
        return super().features() | self._set_flags(*names)

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, out={self.output_size}, local={tuple(self.weight.shape)}, "
            f"bias={self.bias is not None}, gather_output={self.gather_output}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )


class RowParallelLinear(ShardedLinear):
    """`Y = X A + b` with `A` split by rows: each rank multiplies `in/tp` of the inputs, and the products are summed.

    Args:
        input_size: length of the input's last dim, over all ranks.
        output_size: length of the output's last dim.
        bias: whether to add a bias (once, after the sum).
        input_is_parallel: the input is this rank's part `[..., in/tp]` already, as a column-parallel layer leaves it.
        sequence_parallel_enabled: leave the output split along the sequence; needs `input_is_parallel`.
        dtype: dtype of weight and bias.
        device: device of weight and bias; None: torch's default device.
        stride: number of matrices fused along the inputs; each is split separately, so a rank holds chunks
            `[rank::tp]`.
        init_method: fills the whole weight in place; None: like `nn.Linear`.
        sequence_dimension: the dim of the output that is the sequence; None: 0.
        pad: allow an `input_size` that does not divide: zeros fill up the last ranks' parts. A whole input is padded
            here; a parallel input arrives padded, as a column-parallel layer with `pad` leaves it.
        keep_master_weight: keep the whole initial weight as `master_weight`.
        skip_bias_add: return `(output, bias)` without adding the bias.
        reduce_output: False leaves the ranks' products unsummed. Each rank then adds the whole bias, if there is one:
            build the layer without bias where the outputs are summed later.
        tensor_model_parallel_group: the ranks to split over; None: the tensor-parallel ranks.
        reduce_dtype: dtype in which the products are summed over the ranks; None: their own. The output has theirs.
        rank_ordering: the part that each rank holds; None: rank r holds part r.

    Attributes:
        weight: `[out, in/tp]`.
        bias: `[out]` or None, whole on every rank.

    Raises:
        ValueError: the tensor-parallel degree (times stride) does not divide `input_size`, and `pad` is False;
            sequence parallelism with an input that is not split; or `rank_ordering` is not a permutation of the ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
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
        reduce_output: bool = True,
        tensor_model_parallel_group: GivenGroup = None,
        reduce_dtype: torch.dtype | None = None,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        check_linear_arguments(input_size, output_size, sequence_parallel_enabled)
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError(
                "sequence_parallel_enabled=True needs input_is_parallel=True: a sequence-parallel region ends at a "
                "row-parallel layer whose input a column-parallel layer has split"
            )
        super().__init__(
            (output_size, input_size),
            partition_dim=1,
            init_method=init_method or default_linear_init,
            num_matrices=stride,
            pad_multiple=1 if pad else None,
            keep_master_weight=keep_master_weight,
            tensor_model_parallel_group=tensor_model_parallel_group,
            rank_ordering=rank_ordering,
        )
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.reduce_output, self.reduce_dtype = reduce_output, reduce_dtype
        self._add_parameters(dtype, device, bias=bias)
        if self.bias is not None:
            # It is added to a part of the sequence: its gradient is partial, and must be summed over the ranks.
            mark_sequence_parallel(self.bias, sequence_parallel_enabled)

    @property
    def padded_input_size(self) -> int:
        """Length of the inputs over all ranks, including padding."""
        return self.padded_length

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """`[..., in]`, or `[..., in/tp]` with `input_is_parallel`, to `[..., out]`; the output is `[seq/tp, ..., out]`
        with sequence parallelism.

        With `skip_bias_add` the result is a tuple of the output and the bias.
        """
        group = self.group()
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(self._in_rank_order(input_), process_group=group)
        weight, bias = self.weight_and_bias(input_.dtype)
        added = None if self.skip_bias_add else bias
        if group.size == 1 and self.scale is None:
            output = F.linear(input_, weight, added)
        else:
            output = self._reduced(self.scaled(F.linear(input_, weight)), group)
            output = output if added is None else output + added.to(output.dtype)
        return (output, bias) if self.skip_bias_add else output

    def _in_rank_order(self, whole: Tensor) -> Tensor:
        """Pad and reorder a whole input so that the ranks' inputs are equal parts of it, in the order of the ranks."""
        if padding := self.padded_length - self.input_size:
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

    def features(self) -> dict[str, str]:
        """See `ShardedLinear.features`."""
        flags = self._set_flags("input_is_parallel", "sequence_parallel_enabled", "skip_bias_add", "reduce_dtype")
        unsummed = {} if self.reduce_output else {"reduce_output": "reduce_output=False"}
        return super().features() | flags | unsummed

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, out={self.output_size}, local={tuple(self.weight.shape)}, "
            f"bias={self.bias is not None}, input_is_parallel={self.input_is_parallel}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )


def column_outputs(
    input_: Tensor, layers: Sequence[ColumnParallelLinear], *, sums_input_grad: bool = True
) -> tuple[Tensor, ...]:
    """Compute the outputs of layers with one input, without their hooks: one collective per direction for all.

    Args:
        input_: as for `ColumnParallelLinear.forward`.
        layers: layers with the same sequence-parallel arguments.
        sums_input_grad: False leaves the input's gradient partial: it is summed over the ranks elsewhere.
    """
    first = layers[0]
    for layer in layers[1:]:
        if _expected_input(layer) != _expected_input(first):
            raise ValueError(f"layers that share an input must expect the same one; got {first} and {layer}")
    group = first.group()
    parameters = [layer.weight_and_bias(input_.dtype) for layer in layers]
    biases = [None if layer.skip_bias_add else bias for layer, (_, bias) in zip(layers, parameters, strict=True)]
    outputs = column_linear(
        input_,
        [weight for weight, _ in parameters],
        [bias if layer.scale is None else None for layer, bias in zip(layers, biases, strict=True)],
        group if sums_input_grad else None,
        sequence_dim=first.sequence_dimension if first.sequence_parallel_enabled else None,
        reduce_dtype=first.reduce_dtype,
    )
    return tuple(_finished(output, bias, layer) for output, bias, layer in zip(outputs, biases, layers, strict=True))


def _finished(output: Tensor, bias: Tensor | None, layer: ColumnParallelLinear) -> Tensor:
    """Apply what follows the product: scales and bias of a quantized layer, and the gathering."""
    if layer.scale is not None:
        output = layer.scaled(output)
        output = output if bias is None else output + bias.to(output.dtype)
    return gathered_output(output, layer) if layer.gather_output else output


def gathered_output(output: Tensor, layer: ColumnParallelLinear) -> Tensor:
    """Gather `[..., out/tp]` to `[..., out]`, without padding unless the layer keeps it."""
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


def check_linear_arguments(input_size: int, output_size: int, sequence_parallel_enabled: object) -> None:
    """Raise a ValueError for sizes and flags that no linear layer of this package supports."""
    if input_size < 1 or output_size < 1:
        raise ValueError(f"input_size={input_size}, output_size={output_size}: both must be positive")
    if not isinstance(sequence_parallel_enabled, bool):
        raise ValueError(
            f"sequence_parallel_enabled={sequence_parallel_enabled!r} is not a bool; "
            "pass dtype, device and what follows by keyword"
        )
