"""The styles of a plan: a table from a style's name to what it does to one module or parameter.

Names and meanings are those of transformers 5 and 4; the implementation differs. `register_style` adds to the table.
A style of this package first checks its target, and returns the function that changes the model: so all targets of a
plan are checked before the first one is changed.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from nxd_state import active_group
from nxd_state.mesh import divisors
from torch import Tensor, nn

from nxd_layers.hf.layers import (
    column_parallel,
    divide_bias,
    mark_partial_gradients,
    on_meta,
    parallel_embedding,
    row_parallel,
    shard_parameter,
    shard_spec_along,
    split_conv1d_inputs,
    split_conv1d_outputs,
    sum_output,
)
from nxd_layers.hf.transformers_models import is_conv1d, text_config
from nxd_layers.mappings import copy_to_tensor_model_parallel_region


@dataclass(frozen=True)
class Target:
    """The module or parameter that a style is applied to.

    Attributes:
        model: the model.
        path: the path of a module or of a parameter in it.
    """

    model: nn.Module
    path: str

    @property
    def parent(self) -> nn.Module:
        """The module that owns it."""
        return self.model.get_submodule(self.path.rpartition(".")[0])

    @property
    def name(self) -> str:
        """The name of the module or parameter in `parent`."""
        return self.path.rpartition(".")[2]

    @property
    def is_parameter(self) -> bool:
        """Whether the target is a parameter, and not a module."""
        return self.name in self.parent._parameters

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            ValueError: the target is a parameter.
        """
        if self.is_parameter:
            raise ValueError(f"{self.path} is a parameter, where this style expects a module")
        return self.model.get_submodule(self.path)

    def check_is_parameter(self) -> None:
        """Raise a ValueError if the target is a module."""
        if not self.is_parameter:
            raise ValueError(f"{self.path} is a {type(self.module).__name__}, where this style expects a parameter")

    def replace(self, module: nn.Module) -> None:
        """Put another module in its place."""
        setattr(self.parent, self.name, module)

    def of_class(self, cls: type[nn.Module]) -> Any:
        """Return the module, which must be of this very class: a subclass may compute something else.

        Raises:
            ValueError: the target is a parameter, or a module of another class.
        """
        if self.is_parameter or type(self.module) is not cls:
            found = "parameter" if self.is_parameter else type(self.module).__name__
            raise ValueError(f"{self.path} is a {found}, where this style expects a torch.nn.{cls.__name__}")
        return self.module


Apply: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Style:
    """What a style does.

    Attributes:
        prepare: checks a target, and returns the function that changes the model.
        shards_output: whether a layer's output stays sharded, and with it the heads of an attention.
        keeps_parameters: whether a module's parameters stay in place, so that tied parameters stay tied.
    """

    prepare: Callable[[Target], Apply]
    shards_output: bool = False
    keeps_parameters: bool = False


def register_style(
    name: str, apply: Callable[[Target], object], *, shards_output: bool = False, keeps_parameters: bool = False
) -> None:
    """Add a style to those that plans may name, or replace one.

    Args:
        name: the style's name in plans.
        apply: a function that is called with each `Target` of the style, on every rank alike. It changes the module in
            place, or puts another in its place (`target.replace(...)`), and gives a parameter that is no longer full
            its `ShardSpec` (`nxd_state.set_shard_spec`).
        shards_output: whether the output of a layer stays sharded, as that of "colwise". An attention whose layers
            have such a style then computes with this rank's number of heads.
        keeps_parameters: whether a module keeps its parameters, which may then be tied to others.
    """
    _STYLES[name] = Style(lambda target: partial(apply, target), shards_output, keeps_parameters)


def style_named(name: str) -> Style:
    """Return a style.

    Raises:
        ValueError: there is no such style.
    """
    if name not in _STYLES:
        near = difflib.get_close_matches(name, _STYLES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown style {name!r}; {hint}use one of {', '.join(sorted(_STYLES))}, or add it by "
            f"nxd_layers.hf.register_style({name!r}, function)"
        )
    return _STYLES[name]


def replace_linear(target: Target, make: Callable[[nn.Linear], nn.Module]) -> Apply:
    """Check whether a linear can be replaced, and return the function that does so.

    Args:
        target: an `nn.Linear`.
        make: returns the layer that replaces it, or raises a ValueError.
    """
    linear = target.of_class(nn.Linear)
    make(on_meta(linear))
    return lambda: target.replace(make(linear))


def shard(target: Target, dim: int, *, stride: int = 1) -> Apply:
    """Check whether a parameter can be sharded along `dim`, and return the function that does so."""
    target.check_is_parameter()
    full = target.parent.get_parameter(target.name)
    _check_length(target, full.shape[dim] // stride, "rows" if dim == _rows_dim(target) else "columns")
    shard_spec_along(full, dim, stride=stride)
    return lambda: shard_parameter(target.parent, target.name, dim, stride=stride)


def _check_length(target: Target, length: int, parts: str) -> None:
    """Raise a ValueError that names degrees that would work, unless the tensor-parallel degree divides a length."""
    size = active_group("tp").size
    if length % size:
        degrees = divisors(length)
        near = [max(it for it in degrees if it < size), *[it for it in degrees if it > size][:1]]
        raise ValueError(
            f"tensor_model_parallel_size={size} does not divide the {length} {parts} of {target.path}; "
            f"use {' or '.join(map(str, near))}"
        )


def _column(target: Target, *, stride: int = 1) -> Apply:
    if target.is_parameter:
        return shard(target, _rows_dim(target), stride=stride)
    if is_conv1d(target.module):
        weight = target.module.get_parameter("weight")
        _check_length(target, weight.shape[1] // stride, "outputs")
        shard_spec_along(weight, 1, stride=stride)
        return lambda: split_conv1d_outputs(target.module, stride=stride)
    _check_length(target, target.of_class(nn.Linear).out_features // stride, "outputs")
    return replace_linear(target, partial(column_parallel, gather_output=False, stride=stride))


def _column_gather_output(target: Target) -> Apply:
    return replace_linear(target, partial(column_parallel, gather_output=True, pad=True))


def _row(target: Target) -> Apply:
    if target.is_parameter:
        return shard(target, -1)
    if is_conv1d(target.module):
        _check_length(target, target.module.get_parameter("weight").shape[0], "inputs")
        return lambda: split_conv1d_inputs(target.module)
    _check_length(target, target.of_class(nn.Linear).in_features, "inputs")
    return replace_linear(target, partial(row_parallel, input_is_parallel=True))


def _row_split_input(target: Target) -> Apply:
    return replace_linear(target, partial(row_parallel, input_is_parallel=False, pad=True))


def _packed_row(target: Target) -> Apply:
    """Shard two matrices that are fused in the last dim of a parameter that is stored as `[..., in, out]`."""
    return shard(target, -1, stride=2)


def _interleaved_row(target: Target) -> Apply:
    """Shard two matrices whose columns alternate in the last dim of a parameter `[..., 2 * out]`, in pairs."""
    target.check_is_parameter()
    size = active_group("tp").size
    length = target.parent.get_parameter(target.name).shape[-1]
    if length % (2 * size):
        raise ValueError(
            f"tensor_model_parallel_size={size} does not divide the {length // 2} pairs of columns of {target.path}; "
            "use a degree that does"
        )
    return shard(target, -1)


def _rows_dim(target: Target) -> int:
    """Return the dimension of the outputs in a weight `[..., out, in]` or in a bias `[out]`."""
    return max(target.parent.get_parameter(target.name).dim() - 2, 0)


def _embedding(target: Target, *, shard_across_embedding: bool) -> Apply:
    table = target.module
    if not isinstance(table, nn.Embedding):
        raise ValueError(f"{target.path} is a {type(table).__name__}, where this style expects a torch.nn.Embedding")
    make = partial(parallel_embedding, shard_across_embedding=shard_across_embedding)
    make(on_meta(table))
    return lambda: target.replace(make(table))


def _partial_gradients(target: Target) -> Apply:
    module = target.module
    return lambda: mark_partial_gradients(list(module.parameters()))


def _bias_of_sum(target: Target) -> Apply:
    target.check_is_parameter()
    return lambda: divide_bias(target.parent, target.name)


def _module_style(apply: Callable[[Any], object]) -> Style:
    """A style that applies a function to a module, which keeps its parameters."""
    return Style(lambda target: partial(apply, target.module), keeps_parameters=True)


def _give_own_alibi(attention: nn.Module) -> None:
    """Have an attention take its heads' part of `alibi`, `[batch * heads, 1, seq]`, the biases of all heads.

    ALiBi: Press et al. 2021.
    """

    def with_own_heads(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        group = active_group("tp")
        by_head = kwargs["alibi"].unflatten(0, (-1, group.size, module.num_heads))
        return args, {**kwargs, "alibi": by_head[:, group.rank].flatten(0, 1)}

    attention.register_forward_pre_hook(with_own_heads, with_kwargs=True)


def _sum_experts(experts: nn.Module) -> None:
    """Sum the outputs of experts that tensor-parallel ranks shard, and the gradients of their inputs.

    Inputs, the router's weights included, are full on every rank. The experts' parameters have styles of their own.
    """
    experts.register_forward_pre_hook(_with_copied_inputs, with_kwargs=True)
    experts.register_forward_hook(sum_output)


def _with_copied_inputs(experts: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}


def _copied(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return copy_to_tensor_model_parallel_region(value) if is_float else value


def _divide_input(expert: nn.Module) -> None:
    """Have an expert that returns its input, among experts whose outputs are summed, return 1/tp of it on each rank."""
    expert.register_forward_pre_hook(_divided)


def _divided(expert: nn.Module, args: Any) -> tuple[Any, ...]:
    return args[0] / active_group("tp").size, *args[1:]


def _latent_keys_and_values(target: Target) -> Apply:
    """Sum the gradients of the last `config.qk_rope_head_dim` outputs of a projection.

    In multi-head latent attention (DeepSeek-AI 2024) one projection makes the compressed keys and values, which a
    column-parallel layer takes, and the part of the keys with positions, which all heads share: its gradient is a sum
    over the heads of all ranks.
    """
    length = getattr(text_config(target.model), "qk_rope_head_dim", None)
    if not isinstance(length, int):
        raise ValueError(f"{target.path}: the style mla_kv_a_proj needs config.qk_rope_head_dim, which is {length!r}")

    def with_summed_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        compressed, positional = output.split([output.shape[-1] - length, length], dim=-1)
        return torch.cat([compressed, copy_to_tensor_model_parallel_region(positional)], dim=-1)

    module = target.module
    return lambda: module.register_forward_hook(with_summed_gradient)


def _refuse_sequence_parallel(target: Target) -> Apply:
    raise ValueError(
        f"{target.path}: plans do not set up sequence parallelism; leave the style out and pass sequence_parallel=True"
    )


def _keep(target: Target) -> Apply:
    """Leave a module or parameter full on every rank."""
    return lambda: None


_STYLES: dict[str, Style] = {
    "colwise": Style(_column, shards_output=True),
    "colwise_gather_output": Style(_column_gather_output),
    "colwise_rep": Style(_column_gather_output),
    "rowwise": Style(_row),
    "rowwise_split_input": Style(_row_split_input),
    "rowwise_rep": Style(_row_split_input),
    # Such as gate and up, each of which is sharded on its own.
    "packed_colwise": Style(partial(_column, stride=2), shards_output=True),
    # Equally many heads of queries, keys and values.
    "qkv_colwise": Style(partial(_column, stride=3), shards_output=True),
    "interleaved_rowwise": Style(_interleaved_row),
    "packed_rowwise": Style(_packed_row),
    "embedding_rowwise": Style(partial(_embedding, shard_across_embedding=False)),
    "embedding_colwise": Style(partial(_embedding, shard_across_embedding=True)),
    "bias_of_sum": Style(_bias_of_sum, keeps_parameters=True),
    "alibi": _module_style(_give_own_alibi),
    "replicated_with_grad_allreduce": Style(_partial_gradients, keeps_parameters=True),
    "all_reduce": _module_style(lambda module: module.register_forward_hook(sum_output)),
    "mla_kv_a_proj": Style(_latent_keys_and_values, keeps_parameters=True),
    "moe_tp_experts": _module_style(_sum_experts),
    "moe_identity_expert": _module_style(_divide_input),
    "sequence_parallel": Style(_refuse_sequence_parallel),
    "local_params": Style(_keep, keeps_parameters=True),
    "replicate": Style(_keep, keeps_parameters=True),
}
