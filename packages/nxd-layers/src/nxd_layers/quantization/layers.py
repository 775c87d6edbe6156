"""Linear layers whose weights are int8 or fp8 with scales: column- and row-parallel ones, and a plain one.

The product is computed in the input's dtype with the values as they are, and scaled afterwards: scales are of outputs,
so that is the same as scaling the weight. Weights do not learn; gradients of inputs are complete.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from nxd_state import ShardSpec, active_group, set_partition_attributes, set_shard_spec, shard_along
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.layer_group import layer_group
from nxd_layers.linear import ColumnParallelLinear, check_linear_arguments
from nxd_layers.mappings import (
    GivenGroup,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    process_group_as,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.quantization.tensors import (
    ActivationQuantizationType,
    QuantizationConfig,
    QuantizationType,
    QuantizedDtype,
    default_config,
    quantize,
)
from nxd_layers.row_linear import RowParallelLinear

_WAYS = (QuantizationType.PER_TENSOR_SYMMETRIC, QuantizationType.PER_CHANNEL_SYMMETRIC)
_DTYPES = (QuantizedDtype.INT8, QuantizedDtype.F8E4M3, QuantizedDtype.F8E5M2)


class BaseQuantizeParallelLinear(nn.Module):
    """What quantized layers have in common. The values are zero until a state is loaded, or come from `from_float`.

    Attributes:
        weight: values, `[out, in]`, split as the float layer's.
        scale: float32 `[1]`, or `[out, 1]` per channel, split with the weight's outputs.
        bias: in the float layer's dtype, or None.
        quantization_type: what has a scale of its own.
        quantized_dtype: of the values.
    """

    scale: nn.Parameter
    weight: nn.Parameter
    bias: nn.Parameter | None

    def _set_up(
        self,
        specs: tuple[ShardSpec, ShardSpec, ShardSpec | None],
        *,
        partition_dim: int,
        quantization_type: QuantizationType | str,
        quantized_dtype: QuantizedDtype | torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str | None,
        refused: Mapping[str, bool],
    ) -> None:
        """Make the parameters; specs are of weight, scales per channel, and bias, the latter two maybe whole."""
        self.quantization_type = QuantizationType(quantization_type)
        self.quantized_dtype = QuantizedDtype(quantized_dtype)
        self.dequantized_dtype = dtype
        self.reduce_dtype: torch.dtype | None = None
        asked = [name for name, is_asked in refused.items() if is_asked]
        if self.quantization_type not in _WAYS or self.quantized_dtype not in _DTYPES or asked:
            what = ", ".join([self.quantization_type.value, self.quantized_dtype.name, *asked])
            raise ValueError(
                f"{what}: not supported; weights are quantized per tensor or per output channel, to int8, f8e4m3 or "
                "f8e5m2, without padding, and inputs stay as they are"
            )
        size = active_group("tp").size
        self.tensor_parallel_size = size
        weight_spec, scale_spec, bias_spec = specs
        self.weight = _parameter(weight_spec, self.quantized_dtype.value, device, partition_dim, size)
        if self.quantization_type is QuantizationType.PER_CHANNEL_SYMMETRIC:
            self.scale = _parameter(scale_spec, torch.float32, device, 0, size if partition_dim == 0 else 1)
        else:
            self.scale = _parameter(shard_along((1,), 0, rank=0, size=1), torch.float32, device, 0, 1)
        self.bias = None
        if bias_spec is not None:
            self.bias = _parameter(bias_spec, dtype, device, 0, size if partition_dim == 0 else 1)
        if not self.scale.is_meta:
            nn.init.ones_(self.scale)

    def _product(self, input_: Tensor) -> Tensor:
        values = F.linear(input_, self.weight.to(input_.dtype))
        return (values * self.scale.t()).to(input_.dtype)

    @staticmethod
    def _check_float(layer: ColumnParallelLinear | RowParallelLinear, plain: type[nn.Module]) -> None:
        """Raise a ValueError for what a layer does that the quantized one would not."""
        adapter: Any = getattr(layer, "lora", None)
        unknown = {
            f"a subclass of {plain.__name__}": type(layer) is not plain,
            "skip_bias_add": layer.skip_bias_add,
            "a LoRA adapter that is not merged": adapter is not None and not adapter.is_merged,
        }
        if any(unknown.values()):
            what = ", ".join(name for name, is_set in unknown.items() if is_set)
            raise ValueError(f"{layer} cannot be quantized: it has {what}; leave it out (modules_to_not_convert)")

    @torch.no_grad()
    def _quantize_from(self, layer: ColumnParallelLinear | RowParallelLinear) -> Self:
        """Take over a float layer's values. On all ranks, as ranks may share a scale."""
        self.reduce_dtype = layer.reduce_dtype
        if layer.weight.is_meta:
            return self
        per_channel = self.quantization_type is QuantizationType.PER_CHANNEL_SYMMETRIC
        shares_scale = not per_channel or isinstance(layer, RowParallelLinear)
        values, scale = quantize(
            layer.weight,
            self.quantized_dtype.value,
            channel_axis=0 if per_channel else None,
            group=layer_group(layer.tensor_parallel_size) if shares_scale else None,
        )
        self.weight.data.copy_(values)
        self.scale.copy_(scale)
        if self.bias is not None and layer.bias is not None:
            self.bias.copy_(layer.bias)
        return self


class QuantizedColumnParallel(BaseQuantizeParallelLinear):
    """`ColumnParallelLinear` with quantized weights.

    Args:
        input_size: length of the input's last dim.
        output_size: length of the output's last dim, over all ranks.
        bias: whether to add a bias.
        quantization_type: per tensor or per channel, its name or member.
        gather_output: give every rank the whole output.
        dtype: of the bias.
        quantized_dtype: of the weight.
        device: of all parameters; torch's default device if None.
        stride: matrices fused in the weight.
        sequence_parallel_enabled: the input is split along the sequence, and is gathered first.
        sequence_dimension: which dim of the input is the sequence; 0 if None.
        keep_master_weight: of the old runtime; of no effect.
        quantization_per_channel_axis: 0 or None: scales are of outputs.
        block_axis: None.
        block_size: None.
        scale_dtype: float32.
        tensor_model_parallel_group: None, or the tensor-parallel ranks.
        pad: False.
        activation_quantization_type: None: inputs stay as they are.
        clamp_bound: of quantized inputs; of no effect.
        rank_ordering: None, or the order of the ranks.

    Raises:
        ValueError: a way of quantizing that is not supported, or sizes that do not divide.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        device: torch.device | str | None = None,
        stride: int = 1,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: Any = torch.float32,
        tensor_model_parallel_group: Any = None,
        pad: bool = False,
        activation_quantization_type: ActivationQuantizationType | str | None = None,
        clamp_bound: float = float("inf"),
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_linear_arguments(input_size, output_size, sequence_parallel_enabled)
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        group = active_group("tp")
        weight, scale, own_bias = (
            shard_along(shape, 0, rank=group.rank, size=group.size, stride=stride)
            for shape in [(output_size, input_size), (output_size, 1), (output_size,)]
        )
        self._set_up(
            (weight, scale, own_bias if bias else None),
            partition_dim=0,
            quantization_type=quantization_type,
            quantized_dtype=quantized_dtype,
            dtype=dtype,
            device=device,
            refused={
                f"quantization_per_channel_axis={quantization_per_channel_axis}": bool(quantization_per_channel_axis),
                "activation_quantization_type": ActivationQuantizationType(activation_quantization_type).value
                is not None,
                "pad": pad,
                "gather_output with stride": gather_output and stride > 1,
                **_other_ranks(tensor_model_parallel_group, rank_ordering),
            },
        )

    def forward(self, input_: Tensor, *_: Any) -> Tensor:
        """`[..., in]` to `[..., out/tp]`, or `[..., out]` with `gather_output`; `[seq/tp, ...]` in if split so."""
        layer_group(self.tensor_parallel_size)
        if self.sequence_parallel_enabled:
            input_ = gather_from_sequence_parallel_region(input_, self.sequence_dimension)
        else:
            input_ = copy_to_tensor_model_parallel_region(input_)
        output = self._product(input_)
        output = output if self.bias is None else output + self.bias.to(output.dtype)
        return gather_from_tensor_model_parallel_region(output) if self.gather_output else output

    @classmethod
    def from_float(cls, mod: ColumnParallelLinear, q_config: QuantizationConfig | None = None) -> Self:
        """The layer with quantized weights. Called by all ranks.

        Args:
            mod: may be on the meta device; then so is the result.
            q_config: how; `default_config()` if None.

        Raises:
            ValueError: a way of quantizing that is not supported, or a padded layer.
        """
        cls._check_float(mod, ColumnParallelLinear)
        config = q_config or default_config()
        made = cls(
            mod.input_size,
            mod.output_size,
            bias=mod.bias is not None,
            gather_output=mod.gather_output,
            dtype=mod.weight.dtype,
            device=mod.weight.device,
            stride=mod.stride,
            sequence_parallel_enabled=mod.sequence_parallel_enabled,
            sequence_dimension=mod.sequence_dimension,
            pad=mod.padded_output_size != mod.output_size,
            tensor_model_parallel_group=mod.given_group,
            rank_ordering=mod.rank_ordering,
            **_of_config(config),
        )
        return made._quantize_from(mod)


class QuantizedRowParallel(BaseQuantizeParallelLinear):
    """`RowParallelLinear` with quantized weights.

    Args:
        input_size: length of the input's last dim, over all ranks.
        output_size: length of the output's last dim.
        bias: whether to add a bias.
        quantization_type: per tensor or per channel, its name or member.
        input_is_parallel: the input is this rank's part already.
        dtype: of the bias.
        quantized_dtype: of the weight.
        device: of all parameters; torch's default device if None.
        stride: 1.
        sequence_parallel_enabled: leave the output split along the sequence; needs `input_is_parallel`.
        sequence_dimension: which dim of the output is the sequence; 0 if None.
        keep_master_weight: of the old runtime; of no effect.
        quantization_per_channel_axis: 0 or None: scales are of outputs.
        reduce_output: sum over the ranks; False leaves partial sums, to each of which the whole bias is added.
        tensor_model_parallel_group: None, or the tensor-parallel ranks.
        pad: False.
        activation_quantization_type: None: inputs stay as they are.
        clamp_bound: of quantized inputs; of no effect.
        block_axis: None.
        block_size: None.
        scale_dtype: float32.
        rank_ordering: None, or the order of the ranks.

    Raises:
        ValueError: a way of quantizing that is not supported, or sizes that do not divide.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        device: torch.device | str | None = None,
        stride: int = 1,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        pad: bool = False,
        activation_quantization_type: ActivationQuantizationType | str | None = None,
        clamp_bound: float = float("inf"),
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: Any = torch.float32,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_linear_arguments(input_size, output_size, sequence_parallel_enabled)
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("sequence_parallel_enabled=True needs input_is_parallel=True")
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.reduce_output = reduce_output
        group = active_group("tp")
        weight = shard_along((output_size, input_size), 1, rank=group.rank, size=group.size)
        scale, whole_bias = (shard_along(shape, 0, rank=0, size=1) for shape in [(output_size, 1), (output_size,)])
        self._set_up(
            (weight, scale, whole_bias if bias else None),
            partition_dim=1,
            quantization_type=quantization_type,
            quantized_dtype=quantized_dtype,
            dtype=dtype,
            device=device,
            refused={
                f"quantization_per_channel_axis={quantization_per_channel_axis}": bool(quantization_per_channel_axis),
                "activation_quantization_type": ActivationQuantizationType(activation_quantization_type).value
                is not None,
                "pad": pad,
                f"stride={stride}": stride != 1,
                **_other_ranks(tensor_model_parallel_group, rank_ordering),
            },
        )

    def forward(self, input_: Tensor, *_: Any) -> Tensor:
        """`[..., in]` (`[..., in/tp]` if parallel) to `[..., out]`; `[seq/tp, ..., out]` if sequence parallel."""
        layer_group(self.tensor_parallel_size)
        partial = self._product(input_ if self.input_is_parallel else scatter_to_tensor_model_parallel_region(input_))
        wide = partial if self.reduce_dtype is None else partial.to(self.reduce_dtype)
        if not self.reduce_output:
            output = partial
        elif self.sequence_parallel_enabled:
            output = reduce_scatter_to_sequence_parallel_region(wide, self.sequence_dimension).to(partial.dtype)
        else:
            output = reduce_from_tensor_model_parallel_region(wide).to(partial.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @classmethod
    def from_float(cls, mod: RowParallelLinear, q_config: QuantizationConfig | None = None) -> Self:
        """The layer with quantized weights. Called by all ranks.

        Args:
            mod: may be on the meta device; then so is the result.
            q_config: how; `default_config()` if None.

        Raises:
            ValueError: a way of quantizing that is not supported, or a padded layer.
        """
        cls._check_float(mod, RowParallelLinear)
        made = cls(
            mod.input_size,
            mod.output_size,
            bias=mod.bias is not None,
            input_is_parallel=mod.input_is_parallel,
            dtype=mod.weight.dtype,
            device=mod.weight.device,
            sequence_parallel_enabled=mod.sequence_parallel_enabled,
            sequence_dimension=mod.sequence_dimension,
            pad=mod.padded_input_size != mod.input_size,
            stride=mod.stride,
            reduce_output=mod.reduce_output,
            tensor_model_parallel_group=mod.given_group,
            rank_ordering=mod.rank_ordering,
            **_of_config(q_config or default_config()),
        )
        return made._quantize_from(mod)


class QuantizedLinear(nn.Module):
    """`nn.Linear` with quantized weights, whole on every rank.

    Args:
        weight: values `[out, in]`.
        scale: float32 `[1]` or `[out, 1]`.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, input_: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        output = (F.linear(input_, self.weight.to(input_.dtype)) * self.scale.t()).to(input_.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @classmethod
    def from_float(cls, mod: nn.Linear, dtype: torch.dtype = torch.int8, *, per_channel: bool = True) -> Self:
        """The layer with quantized weights.

        Raises:
            ValueError: nothing is quantized to `dtype`.
        """
        values, scale = quantize(mod.weight, dtype, channel_axis=0 if per_channel else None)
        return cls(values, scale, mod.bias)


def _parameter(
    spec: ShardSpec, dtype: torch.dtype, device: torch.device | str | None, partition_dim: int, num_partitions: int
) -> nn.Parameter:
    """A parameter of zeros that does not learn and knows its shard metadata."""
    parameter = nn.Parameter(torch.zeros(spec.local_shape, dtype=dtype, device=device), requires_grad=False)
    if num_partitions > 1:
        set_shard_spec(parameter, spec)
        set_partition_attributes(parameter, partition_dim=partition_dim, num_partitions=num_partitions)
    return parameter


def _other_ranks(group: GivenGroup, ordering: Sequence[int] | None) -> dict[str, bool]:
    """Which arguments would have the weight split over other ranks than the tensor-parallel ones, in their order."""
    return {
        "tensor_model_parallel_group": group is not None and process_group_as(group).ranks != active_group("tp").ranks,
        f"rank_ordering={ordering}": ordering is not None and list(ordering) != sorted(ordering),
    }


def _quantizes_inputs(how: ActivationQuantizationType | str | None) -> bool:
    return ActivationQuantizationType(how) is not ActivationQuantizationType.NONE


def _of_config(config: QuantizationConfig) -> dict[str, Any]:
    names = ("quantization_type", "quantized_dtype", "quantization_per_channel_axis", "activation_quantization_type")
    return {name: config[name] for name in names if name in config}  # type: ignore[literal-required]
