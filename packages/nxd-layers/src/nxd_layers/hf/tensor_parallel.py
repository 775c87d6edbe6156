"""Tensor parallelism of a model in two steps: `check_layers` checks a plan as a whole, `shard_layers` applies it.

Nothing of the model changes before all of the plan has been checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_state import active_group, get_shard_spec, has_whole_experts
from torch import nn

from nxd_layers.hf.adapted_layers import check_adapters, check_heads_of_adapters, styles_with_adapters
from nxd_layers.hf.head_layout import (
    HeadLayout,
    attention_layout,
    attention_modules,
    check_head_counts,
    set_head_counts,
)
from nxd_layers.hf.head_linears import shard_heads
from nxd_layers.hf.layers import column_parallel, on_meta, parallel_embedding
from nxd_layers.hf.plans import is_within, join_path
from nxd_layers.hf.sequence_parallel import SequenceBlocks, SequenceParallelHooks, sequence_blocks
from nxd_layers.hf.split_activations import PerRankRngHooks, adapt_activations, share_inputs
from nxd_layers.hf.styles import Apply, Target, style_named
from nxd_layers.hf.transformers_models import input_embeddings, output_embeddings
from nxd_layers.linear import ColumnParallelLinear

# In latent attention these come before the sharded layers, which sum the gradient of their input.
_BEFORE_SHARDED_LAYERS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer")
_FUSED = ("gate_up_proj", "gate_up_proj_bias")


@dataclass(frozen=True)
class CheckedLayers:
    """A plan for the layers of one model, checked.

    Attributes:
        styles: the styles of modules and parameters, by path.
        apply: the function that shards each of them, by path, in the order in which they are called.
        layouts: the layouts of attention modules whose heads are sharded, by path.
        ends: the tied input and output embeddings; None if they are not sharded together.
        blocks: the blocks of sequence parallelism; None without it.
    """

    styles: Mapping[str, str]
    apply: Mapping[str, Apply]
    layouts: Mapping[str, HeadLayout]
    ends: "_TiedEnds | None"
    blocks: SequenceBlocks | None


@dataclass(frozen=True)
class _TiedEnds:
    """The paths of a table and a head that are one parameter, and the names of parameters tied to the head's bias."""

    table: str
    head: str
    tied_to_bias: Sequence[str]


def check_layers(
    model: Any, styles: Mapping[str, str], expert_styles: Mapping[str, str], *, sequence_parallel: bool
) -> CheckedLayers:
    """Check the whole plan for this model, and return what `shard_layers` needs to apply it.

    Args:
        model: the unsharded model.
        styles: the styles of modules and parameters, by path.
        expert_styles: the styles of experts that are distributed over ranks, by path.
        sequence_parallel: whether hidden states between blocks are to be split along the sequence.

    Raises:
        ValueError: the plan does not fit the model or the tensor-parallel degree.
    """
    tp_size = active_group("tp").size
    if has_whole_experts():
        styles = {path: style for path, style in styles.items() if not any(is_within(path, it) for it in expert_styles)}
    for style in styles.values():
        style_named(style)
    attentions = attention_modules(model, _sharded_outputs(styles))
    _refuse_wrong_plans(model, styles, attentions)
    layouts = {path: attention_layout(path, it, model, tp_size) for path, it in attentions.items()}
    blocks = sequence_blocks(model, {**expert_styles, **styles}) if sequence_parallel else None
    ties = _ties_of(model)
    ends = _tied_ends(model, ties)
    apply: dict[str, Apply] = {}
    done = set() if ends is None else {ends.table, ends.head}
    for path, layout in layouts.items():
        if not layout.is_plain:
            check_heads_of_adapters(path, attentions[path])
            apply |= shard_heads(Target(model, path), styles, layout)
    check_adapters(model, sequence_parallel=sequence_parallel)
    for path, style in styles_with_adapters(model, styles).items():
        if path not in apply and path not in done:
            apply[path] = style_named(style).prepare(Target(model, path))
    _check_ties(ties, {path: style for path, style in styles.items() if path not in done})
    for path, layout in layouts.items():
        check_head_counts(path, attentions[path], layout)
    return CheckedLayers(styles, apply, layouts, ends, blocks)


def shard_layers(model: Any, checked: CheckedLayers) -> None:
    """Shard the layers, and make the modules around them compute with shards."""
    if checked.ends is not None:
        _shard_ends(model, checked.ends)
    for apply in checked.apply.values():
        apply()
    for path, layout in checked.layouts.items():
        set_head_counts(model.get_submodule(path), layout)
    share_inputs(model)
    columns = _sharded_outputs(checked.styles)
    adapt_activations(model, columns, checked.styles)
    if active_group("cp").size == 1:  # attention over context-parallel ranks draws its masks by the numbers of heads
        rows = [path for path, style in checked.styles.items() if style == "rowwise"]
        PerRankRngHooks(
            model, *[[it for it in paths if not Target(model, it).is_parameter] for paths in (columns, rows)]
        )
    if checked.blocks is not None:
        SequenceParallelHooks(model, checked.blocks)


def _sharded_outputs(styles: Mapping[str, str]) -> list[str]:
    return [path for path, style in styles.items() if style_named(style).shards_output]


def _refuse_wrong_plans(model: nn.Module, styles: Mapping[str, str], attentions: Mapping[str, nn.Module]) -> None:
    """Raise a ValueError if a plan cannot be right, whatever the sizes."""
    sharded = {name for name, it in model.named_parameters(remove_duplicate=False) if get_shard_spec(it) is not None}
    for path, style in styles.items():
        if any(is_within(name, path) for name in sharded):
            raise ValueError(f"{path} is sharded already; call parallelize() once, with an unsharded model")
        if path.rpartition(".")[2] in _FUSED and style in ("colwise", "rowwise"):
            parent = model.get_submodule(path.rpartition(".")[0])
            raise ValueError(
                f"{path} of {type(parent).__name__} holds two matrices, but {style!r} shards it as one; give it the "
                f"style packed_{style}"
            )
    for path, attention in attentions.items():
        for name, _ in attention.named_parameters():
            full_name = join_path(path, name)
            is_planned = any(style != "local_params" and is_within(full_name, it) for it, style in styles.items())
            if not is_planned and name.partition(".")[0] not in _BEFORE_SHARDED_LAYERS:
                raise ValueError(
                    f"{full_name} is among the sharded heads of {type(attention).__name__}, but the plan does not name "
                    "it; give it a style, such as replicated_with_grad_allreduce for a norm of single heads"
                )
    places: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in styles and places.setdefault(module, path) != path:
            raise ValueError(
                f"{path} is the same module as {places[module]}, and cannot be sharded twice; leave both out of the "
                "plan"
            )
    config: Any = getattr(model, "config", None)
    if getattr(config, "slow_but_exact", False) and getattr(config, "pretraining_tp", 1) > 1:
        raise ValueError(
            f"slow_but_exact=True with pretraining_tp={config.pretraining_tp} multiplies slices of weights instead of "
            "calling the layers that are sharded; set config.slow_but_exact=False before the model is built, or use "
            "tensor_model_parallel_size=1"
        )


def _tied_ends(model: Any, ties: Sequence[Sequence[str]]) -> _TiedEnds | None:
    """Return the tied input and output embeddings, which are sharded together along the vocabulary to stay tied.

    A table that more modules share stays full.
    """
    table, head = input_embeddings(model), output_embeddings(model)
    names = {module: name for name, module in model.named_modules()}
    if not (isinstance(table, nn.Embedding) and type(head) is nn.Linear and table.weight is head.weight):
        return None
    if {join_path(names[table], "weight"), join_path(names[head], "weight")} not in map(set, ties):
        return None
    parallel_embedding(on_meta(table))
    bias = join_path(names[head], "bias")
    tied_to_bias = [name for tied in ties if bias in tied for name in tied if name != bias]
    return _TiedEnds(names[table], names[head], tied_to_bias)


def _shard_ends(model: Any, ends: _TiedEnds) -> None:
    table = parallel_embedding(model.get_submodule(ends.table))
    head: ColumnParallelLinear = column_parallel(model.get_submodule(ends.head), gather_output=True, pad=True)
    head.weight = table.weight
    Target(model, ends.table).replace(table)
    Target(model, ends.head).replace(head)
    for other in ends.tied_to_bias:
        path, _, name = other.rpartition(".")
        model.get_submodule(path).register_parameter(name, head.bias)


def _ties_of(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _check_ties(ties: Sequence[Sequence[str]], styles: Mapping[str, str]) -> None:
    """Raise a ValueError if a style replaces a parameter in one of several places."""
    paths = [path for path, style in styles.items() if not style_named(style).keeps_parameters]
    for tied in ties:
        if any(is_within(name, path) for name in tied for path in paths):
            raise ValueError(
                f"{' and '.join(tied)} are one parameter, but the plan would shard them apart; leave them out of the "
                "plan, or untie them"
            )
