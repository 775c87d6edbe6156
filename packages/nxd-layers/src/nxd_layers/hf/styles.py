"""The styles of a plan: a table from a style's name to the function that applies it to one module or parameter.

Names and meanings are those of transformers 5 and 4; the implementation differs. `register_style` adds to the table.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nxd_state import active_group
from torch import Tensor, nn

from nxd_layers.hf import experts, latent_attention
from nxd_layers.hf.layers import (
    column_parallel,
    mark_partial_gradients,
    parallel_embedding,
    row_parallel,
    shard_parameter,
    share_bias,
    split_conv1d_inputs,
    split_conv1d_outputs,
)
from nxd_layers.hf.transformers_models import is_conv1d
from nxd_layers.mappings import reduce_from_tensor_model_parallel_region


@dataclass(frozen=True)
class Target:
    """The module or parameter that a style is applied to.

    Attributes:
        model: the whole model.
        path: of a module, or of a parameter, in it.
    """

    model: nn.Module
    path: str

    @property
    def parent(self) -> nn.Module:
        """The module that owns it."""
        return self.model.get_submodule(self.path.rpartition(".")[0])

    @property
    def name(self) -> str:
        """Its name in `parent`."""
        return self.path.rpartition(".")[2]

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, and not a module."""
        return self.name in self.parent._parameters

    @property
    def module(self) -> nn.Module:
        """The module itself.

        Raises:
            ValueError: it is a parameter.
        """
        if self.is_parameter:
            raise ValueError(f"{self.path} is a parameter, where this style expects a module")
        return self.model.get_submodule(self.path)

    def check_is_parameter(self) -> None:
        """Raise a ValueError if it is a module."""
        if not self.is_parameter:
            raise ValueError(f"{self.path} is a {type(self.module).__name__}, where this style expects a parameter")

    def replace(self, module: nn.Module) -> None:
        """Put another module in its place."""
        setattr(self.parent, self.name, module)

    def of_class(self, cls: type[nn.Module]) -> Any:
        """The module, which must be of this very class: a subclass may compute something else.

        Raises:
            ValueError: it is not.
        """
        if self.is_parameter or type(self.module) is not cls:
            found = "parameter" if self.is_parameter else type(self.module).__name__
            raise ValueError(f"{self.path} is a {found}, where this style expects a torch.nn.{cls.__name__}")
        return self.module


ApplyStyle = Callable[[Target], object]


def register_style(name: str, apply: ApplyStyle) -> None:
    """Add a style to those that plans may name, or replace one.

    Args:
        name: as plans have it.
        apply: called with each `Target` of the style, on every rank alike. It changes the module in place, or puts
            another in its place (`target.replace(...)`), and gives a parameter that is no longer whole its
            `ShardSpec` (`nxd_state.set_shard_spec`).
    """
    _STYLES[name] = apply


def style_named(name: str) -> ApplyStyle:
    """The function that applies a style.

    Raises:
        ValueError: there is no such style.
    """
    if name not in _STYLES:
        near = difflib.get_close_matches(name, _STYLES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"style {name!r} is unknown; {hint}known are {', '.join(sorted(_STYLES))}. Add it by "
            f"nxd_layers.hf.register_style({name!r}, function)"
        )
    return _STYLES[name]


def _column(target: Target, *, gather_output: bool = False) -> None:
    if target.is_parameter and not gather_output:
        shard_parameter(target.parent, target.name, _rows_dim(target))
    elif not gather_output and is_conv1d(target.module):
        split_conv1d_outputs(target.module)
    else:
        target.replace(column_parallel(target.of_class(nn.Linear), gather_output=gather_output, pad=gather_output))


def _row(target: Target, *, input_is_parallel: bool = True) -> None:
    if target.is_parameter and input_is_parallel:
        shard_parameter(target.parent, target.name, -1)
    elif input_is_parallel and is_conv1d(target.module):
        split_conv1d_inputs(target.module)
    else:
        linear = target.of_class(nn.Linear)
        target.replace(row_parallel(linear, input_is_parallel=input_is_parallel, pad=not input_is_parallel))


def _packed_column(target: Target) -> None:
    """Two matrices fused, such as gate and up, each cut on its own."""
    if target.is_parameter:
        shard_parameter(target.parent, target.name, _rows_dim(target), stride=2)
    else:
        target.replace(column_parallel(target.of_class(nn.Linear), gather_output=False, stride=2))


def _qkv_column(target: Target) -> None:
    """Queries, keys and values fused, equally many heads of each, each cut on its own."""
    if is_conv1d(target.module):
        split_conv1d_outputs(target.module, stride=3)
    else:
        target.replace(column_parallel(target.of_class(nn.Linear), gather_output=False, stride=3))


def _interleaved_row(target: Target) -> None:
    """Two matrices column by column in the last dim of a parameter `[..., 2 * out]`, which are to stay together."""
    target.check_is_parameter()
    size = active_group("tp").size
    length = target.parent.get_parameter(target.name).shape[-1]
    if length % (2 * size):
        raise ValueError(
            f"{target.path} has {length} columns, which are no pairs for {size} ranks; use a tensor-parallel degree "
            f"that divides {length // 2}"
        )
    shard_parameter(target.parent, target.name, -1)


def _packed_row(target: Target) -> None:
    """Two matrices fused in the last dim of a parameter that is stored as `[..., in, out]`."""
    target.check_is_parameter()
    shard_parameter(target.parent, target.name, -1, stride=2)


def _rows_dim(target: Target) -> int:
    """The outputs of a weight `[..., out, in]`, or of a bias `[out]`."""
    return max(target.parent.get_parameter(target.name).dim() - 2, 0)


def _embedding(target: Target, *, shard_across_embedding: bool) -> None:
    table = target.module
    if not isinstance(table, nn.Embedding):
        raise ValueError(f"{target.path} is a {type(table).__name__}, where this style expects a torch.nn.Embedding")
    target.replace(parallel_embedding(table, shard_across_embedding=shard_across_embedding))


def _partial_gradients(target: Target) -> None:
    mark_partial_gradients(list(target.module.parameters()))


def _bias_of_sum(target: Target) -> None:
    target.check_is_parameter()
    share_bias(target.parent, target.name)


def _alibi(target: Target) -> None:
    """An attention whose forward takes biases of all heads, `alibi`, `[batch * heads, 1, seq]` (Press et al. 2021)."""

    def with_own_heads(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        group = active_group("tp")
        by_head = kwargs["alibi"].unflatten(0, (-1, group.size, module.num_heads))
        return args, {**kwargs, "alibi": by_head[:, group.rank].flatten(0, 1)}

    target.module.register_forward_pre_hook(with_own_heads, with_kwargs=True)


def _sum_output(target: Target) -> None:
    def summed(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return reduce_from_tensor_model_parallel_region(output)

    target.module.register_forward_hook(summed)


def _refuse_sequence_parallel(target: Target) -> None:
    raise ValueError(f"{target.path}: sequence parallelism is not a plan's business; pass sequence_parallel=True")


def _keep(target: Target) -> None:
    """Whole on every rank."""


_STYLES: dict[str, ApplyStyle] = {
    "colwise": _column,
    "colwise_gather_output": partial(_column, gather_output=True),
    "colwise_rep": partial(_column, gather_output=True),
    "rowwise": _row,
    "rowwise_split_input": partial(_row, input_is_parallel=False),
    "rowwise_rep": partial(_row, input_is_parallel=False),
    "packed_colwise": _packed_column,
    "qkv_colwise": _qkv_column,
    "interleaved_rowwise": _interleaved_row,
    "bias_of_sum": _bias_of_sum,
    "alibi": _alibi,
    "packed_rowwise": _packed_row,
    "embedding_rowwise": partial(_embedding, shard_across_embedding=False),
    "embedding_colwise": partial(_embedding, shard_across_embedding=True),
    "replicated_with_grad_allreduce": _partial_gradients,
    "all_reduce": _sum_output,
    "mla_kv_a_proj": latent_attention.apply,
    "moe_tp_experts": lambda it: experts.sum_over_shards(it.module),
    "moe_identity_expert": lambda it: experts.divide_input(it.module),
    "sequence_parallel": _refuse_sequence_parallel,
    "local_params": _keep,
    "replicate": _keep,
}
