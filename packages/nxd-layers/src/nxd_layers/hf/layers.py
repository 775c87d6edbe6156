"""This rank's shard of a parameter, and the parallel layers that replace a model's linears and embeddings.

`nn.Linear` and `nn.Embedding` become the parallel layers of this package. `Conv1D` of transformers, as in GPT-2, stores
its weight transposed, `[in, out]`; that module stays, with a shard of its parameters.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from nxd_state import (
    ShardSpec,
    active_group,
    copy_parameter_attributes,
    get_shard_spec,
    set_partition_attributes,
    set_shard_spec,
)
from nxd_state import shard_along as equal_shards
from nxd_state.parameter_marks import mark_sequence_parallel
from torch import Tensor, nn

from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region

_Column = TypeVar("_Column", bound=ColumnParallelLinear)
_Row = TypeVar("_Row", bound=RowParallelLinear)
_Parallel = TypeVar("_Parallel", bound=ColumnParallelLinear | RowParallelLinear)


@torch.no_grad()
def shard_of(full: Tensor, spec: ShardSpec) -> Tensor:
    """Copy the shard that `spec` describes; padding is zero. The copy is on the device of `full`, meta included."""
    part = full.new_zeros(spec.local_shape)
    spec.copy_from_logical(full, part)
    return part


def take_part(target: nn.Parameter, full: Tensor) -> nn.Parameter:
    """Return the shard of `full` for the parameter `target` of a layer on the meta device, with its attributes."""
    spec = get_shard_spec(target)
    part = full.detach() if spec is None else shard_of(full, spec)
    made = nn.Parameter(part, requires_grad=full.requires_grad)
    copy_parameter_attributes(target, made)
    return made


def shard_parameter(module: nn.Module, name: str, dim: int, *, stride: int = 1) -> None:
    """Replace a parameter by this rank's shard, one of equal shards along `dim`, one per tensor-parallel rank.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name in it.
        dim: the dimension that is sharded.
        stride: number of matrices fused along `dim`, each of which is sharded on its own.
    """
    full = module.get_parameter(name)
    spec = shard_spec_along(full, dim, stride=stride)
    made = nn.Parameter(shard_of(full, spec), requires_grad=full.requires_grad)
    set_shard_spec(made, spec)
    size = active_group("tp").size
    set_partition_attributes(made, partition_dim=dim % full.dim(), num_partitions=size, stride=stride)
    module.register_parameter(name, made)


def shard_spec_along(full: Tensor, dim: int, *, stride: int = 1) -> ShardSpec:
    """Return the spec of this rank's shard for `shard_parameter`."""
    group = active_group("tp")
    return equal_shards(full.shape, dim, rank=group.rank, size=group.size, stride=stride)


def mark_partial_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Mark full parameters whose gradient is partial on each rank; optimizers sum it over the ranks before a step."""
    for parameter in parameters:
        mark_sequence_parallel(parameter)


def column_parallel(
    linear: nn.Linear,
    *,
    gather_output: bool,
    stride: int = 1,
    pad: bool = False,
    cls: type[_Column] = ColumnParallelLinear,  # type: ignore[assignment]
) -> _Column:
    """Return the `ColumnParallelLinear` (or subclass) that replaces a linear; the other arguments are the layer's.

    Raises:
        ValueError: the ranks do not divide the outputs.
    """
    return _take_over(linear, cls, gather_output=gather_output, stride=stride, pad=pad)


def row_parallel(
    linear: nn.Linear,
    *,
    input_is_parallel: bool,
    pad: bool = False,
    cls: type[_Row] = RowParallelLinear,  # type: ignore[assignment]
) -> _Row:
    """Return the `RowParallelLinear` (or subclass) that replaces a linear; the other arguments are the layer's."""
    return _take_over(linear, cls, input_is_parallel=input_is_parallel, pad=pad)


def _take_over(linear: nn.Linear, cls: type[_Parallel], **options: Any) -> _Parallel:
    """Return a layer with its shard of the linear's parameters, and the attributes that models ask a linear for."""
    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    layer = cls(*sizes, bias=has_bias, dtype=linear.weight.dtype, device="meta", **options)
    layer.weight = take_part(layer.weight, linear.weight)
    if layer.bias is not None:
        layer.bias = take_part(layer.bias, linear.bias)
    layer.in_features, layer.out_features = linear.in_features, linear.out_features  # type: ignore[assignment]
    layer.training = linear.training
    return layer


def on_meta(module: Any) -> Any:
    """Return a stand-in for a layer, with parameters on the meta device, to see whether it can be sharded.

    Only its attributes are to be read: the two share their hooks.
    """
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {
        name: None if it is None else nn.Parameter(it.detach().to("meta"), requires_grad=it.requires_grad)
        for name, it in module._parameters.items()
    }
    return twin


def split_conv1d_outputs(layer: Any, *, stride: int = 1) -> None:
    """Have a `Conv1D` compute this rank's outputs, `[..., out/tp]`.

    Args:
        layer: the `Conv1D`.
        stride: number of matrices fused along the outputs, each of which is sharded on its own.
    """
    shard_parameter(layer, "weight", 1, stride=stride)
    shard_parameter(layer, "bias", 0, stride=stride)
    layer.nf = layer.bias.numel()
    layer.register_forward_pre_hook(sum_input_gradient)


def split_conv1d_inputs(layer: Any) -> None:
    """Have a `Conv1D` take this rank's inputs, `[..., in/tp]`, and sum the products over the ranks."""
    shard_parameter(layer, "weight", 0)
    layer.nx = layer.weight.shape[0]
    divide_bias(layer, "bias")
    layer.register_forward_hook(sum_output)


def sum_input_gradient(layer: nn.Module, args: Any) -> tuple[Any, ...]:
    """Forward pre-hook: sum the gradient of the first argument over the tensor-parallel ranks."""
    return copy_to_tensor_model_parallel_region(args[0]), *args[1:]


def sum_output(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: sum the output over the tensor-parallel ranks."""
    return reduce_from_tensor_model_parallel_region(output)


def divide_bias(module: nn.Module, name: str) -> None:
    """Have a module add 1/tp of its bias on each rank, so that the sum of the ranks' outputs has the bias once.

    The gradient of the bias is then partial; see `mark_partial_gradients`.
    """
    mark_partial_gradients([module.get_parameter(name)])
    hooks = _DividedBias(name)
    module.register_forward_pre_hook(hooks.begin)
    module.register_forward_hook(hooks.end, always_call=True)


class _DividedBias:
    """The hooks of `divide_bias`. A property in place of the parameter would change its name or the module's class."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._full: Any = None

    def begin(self, module: nn.Module, args: Any) -> None:
        self._full = module._parameters[self._name]  # a plain tensor while a program is recorded
        module._parameters[self._name] = self._full / active_group("tp").size

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._full is not None:
            module._parameters[self._name], self._full = self._full, None


def parallel_embedding(table: nn.Embedding, *, shard_across_embedding: bool = False) -> Any:
    """Return the `ParallelEmbedding` that replaces a table; a vocabulary that the ranks do not divide is padded.

    The layer that replaces a subclass of `nn.Embedding`, such as one that scales its vectors, still does what the
    subclass does around the lookup.
    """
    if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        raise ValueError(
            f"{table} cannot be sharded: max_norm, scale_grad_by_freq and sparse are not supported; leave it out of "
            "the plan"
        )
    layer = ParallelEmbedding(
        table.num_embeddings,
        table.embedding_dim,
        padding_idx=table.padding_idx,
        dtype=table.weight.dtype,
        device="meta",
        shard_across_embedding=shard_across_embedding,
        pad=True,
    )
    layer.weight = take_part(layer.weight, table.weight)
    layer.training = table.training
    return layer if type(table) is nn.Embedding else _in_class_of(table, layer)


def plain_class_of(layer: ParallelEmbedding) -> type[nn.Module]:
    """Return the class of the table that the layer has replaced."""
    return type(layer).__bases__[0] if isinstance(layer, _Lookup) else nn.Embedding


class _Lookup(ParallelEmbedding, nn.Embedding):  # type: ignore[misc]
    """A parallel table where `super().forward(ids)` of a subclass of `nn.Embedding` expects a plain one."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell pickle how to make an instance of a class that is defined at run time."""
        return _without_state, (plain_class_of(self),), self.__dict__


@cache
def _parallel_class(cls: Any) -> Any:
    return type(f"Parallel{cls.__name__}", (cls, _Lookup), {"__doc__": f"`{cls.__name__}`, sharded over the ranks."})


def _in_class_of(table: nn.Embedding, layer: ParallelEmbedding) -> nn.Module:
    made = _without_state(type(table))
    kept = ("_buffers", "_non_persistent_buffers_set", "_modules")
    made.__dict__.update({**vars(table), **vars(layer), **{name: vars(table)[name] for name in kept}})
    made._parameters = {**table._parameters, **layer._parameters}
    return made


def _without_state(cls: Any) -> nn.Module:
    parallel = _parallel_class(cls)
    made: nn.Module = parallel.__new__(parallel)
    return made
