"""Linear layers whose weight is split over the tensor-parallel ranks, along outputs or along inputs.

`ColumnParallelLinear` followed by `RowParallelLinear` (Shoeybi et al. 2019) needs one sum forward and one backward.
With one rank, or without an initialised mesh, both are `nn.Linear`.
"""

from collections.abc import Sequence

import torch
from nxd_state import active_group, shard_along
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
from nxd_layers.regions import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)


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

    Attributes:
        weight: `[out/tp, in]`.
        bias: `[out/tp]` or None.

    Raises:
        ValueError: the tensor-parallel degree (times stride) does not divide `output_size`.
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
    ) -> None:
        super().__init__()
        _check_arguments(input_size, output_size, sequence_parallel_enabled)
        self.input_size, self.output_size = input_size, output_size
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.stride = stride
        self.init_method = init_method or default_linear_init
        group = active_group("tp")
        self.tensor_parallel_size = group.size
        self._weight_spec = shard_along((output_size, input_size), 0, rank=group.rank, size=group.size, stride=stride)
        self._bias_spec = shard_along((output_size,), 0, rank=group.rank, size=group.size, stride=stride)
        self.weight = empty_sharded_parameter(
            self._weight_spec,
            partition_dim=0,
            num_partitions=group.size,
            stride=stride,
            dtype=dtype,
            device=device,
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_sharded_parameter(
                self._bias_spec,
                partition_dim=0,
                num_partitions=group.size,
                stride=stride,
                dtype=dtype,
                device=device,
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, the same at every tensor-parallel degree."""
        fill_from_logical(self.weight, self._weight_spec, (self.output_size, self.input_size), self.init_method)
        if self.bias is not None:
            fill_from_logical(self.bias, self._bias_spec, (self.output_size,), default_bias_init(self.input_size))

    def forward(self, input_: Tensor) -> Tensor:
        """`[..., in]` to `[..., out/tp]`, or `[..., out]` with `gather_output`; `[seq/tp, ...]` in if split so."""
        return column_parallel_linears(input_, [self])[0]

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, out={self.output_size}, local={tuple(self.weight.shape)}, "
            f"bias={self.bias is not None}, gather_output={self.gather_output}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )


def column_parallel_linears(input_: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Apply several column-parallel layers to one input, with one collective per direction instead of one per layer.

    Args:
        input_: as for `ColumnParallelLinear.forward`.
        layers: query, key and value, or gate and up; alike in their sequence-parallel arguments.

    Returns:
        One output per layer.

    Raises:
        ValueError: the layers expect different inputs.
    """
    if not layers:
        raise ValueError("no layers given; expected at least one ColumnParallelLinear")
    first = layers[0]
    for layer in layers[1:]:
        if _expected_input(layer) != _expected_input(first):
            raise ValueError(f"layers that share an input must expect the same one; got {first} and {layer}")
    outputs = column_linear(
        input_,
        [layer.weight for layer in layers],
        [layer.bias for layer in layers],
        layer_group(first.tensor_parallel_size),
        sequence_dim=first.sequence_dimension if first.sequence_parallel_enabled else None,
    )
    return tuple(
        _gathered(output, layer) if layer.gather_output else output
        for layer, output in zip(layers, outputs, strict=True)
    )


def _gathered(output: Tensor, layer: ColumnParallelLinear) -> Tensor:
    whole = gather_from_tensor_model_parallel_region(output)
    if layer.stride == 1:
        return whole
    # Each rank's part is a chunk of every fused matrix: back to matrix after matrix.
    chunks = whole.unflatten(-1, (layer.tensor_parallel_size, layer.stride, -1))
    return chunks.transpose(-3, -2).flatten(-3)


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

    Attributes:
        weight: `[out, in/tp]`.
        bias: `[out]` or None, whole on every rank.

    Raises:
        ValueError: the tensor-parallel degree does not divide `input_size`; or sequence parallelism with an input
            that is not split.
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
    ) -> None:
        super().__init__()
        _check_arguments(input_size, output_size, sequence_parallel_enabled)
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
        self._weight_spec = shard_along((output_size, input_size), 1, rank=group.rank, size=group.size)
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

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, the same at every tensor-parallel degree."""
        fill_from_logical(self.weight, self._weight_spec, (self.output_size, self.input_size), self.init_method)
        if self.bias is not None:
            fill_from_logical(self.bias, self._bias_spec, (self.output_size,), default_bias_init(self.input_size))

    def forward(self, input_: Tensor) -> Tensor:
        """`[..., in]` (`[..., in/tp]` if parallel) to `[..., out]`; `[seq/tp, ..., out]` if sequence parallel."""
        group = layer_group(self.tensor_parallel_size)
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_)
        if group.size == 1:
            return F.linear(input_, self.weight, self.bias)
        partial = F.linear(input_, self.weight)
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


def _check_arguments(input_size: int, output_size: int, sequence_parallel_enabled: object) -> None:
    if input_size < 1 or output_size < 1:
        raise ValueError(f"input_size={input_size}, output_size={output_size}: both must be positive")
    if not isinstance(sequence_parallel_enabled, bool):
        raise ValueError(
            f"sequence_parallel_enabled={sequence_parallel_enabled!r} is not a bool; "
            "pass dtype, device and what follows by keyword"
        )
