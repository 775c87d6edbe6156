"""`parallelize`: from an unmodified model of transformers to this rank's part of it."""

from collections.abc import Mapping
from typing import Any

from nxd_state import active_group
from torch import nn

from nxd_layers.hf import checks, guards, heads
from nxd_layers.hf.copies import keep_marks_in_copies
from nxd_layers.hf.embeddings import parallel_embedding
from nxd_layers.hf.generation import draw_alike
from nxd_layers.hf.initialization import initialize
from nxd_layers.hf.linears import column_parallel
from nxd_layers.hf.loss import split_loss
from nxd_layers.hf.plan import named_styles
from nxd_layers.hf.sequence import SequenceRegion, region_of
from nxd_layers.hf.shared_inputs import share_inputs
from nxd_layers.hf.styles import Target, style_named
from nxd_layers.hf.transformers_models import (
    build_on_meta,
    input_embeddings,
    is_transformers_config,
    output_embeddings,
    own_plan,
)
from nxd_layers.linear import ColumnParallelLinear

# Styles that leave a layer's outputs split, and with them the heads of an attention.
_SPLITS_OUTPUTS = ("colwise", "packed_colwise")


def parallelize(
    model_or_config: Any,
    *,
    plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    vocabulary_parallel_loss: bool = True,
) -> Any:
    """Split a model over the tensor-parallel ranks, as its plan says; called by all of them, after
    `initialize_model_parallel`.

    Linears and embeddings become parallel layers, experts keep a part of each of them, and attention modules learn how
    many heads are here. Names of modules and parameters stay, and so do the model's class, its forward and
    `generate()`. Every parameter that is no longer whole says so by its `ShardSpec`, whose logical tensor has the name
    and shape of the unsharded model's; one that is whole, but of whose gradient each rank has a part, by
    `sequence_parallel_enabled`, and the optimizer must sum it (`nxd_optim` does).

    Args:
        model_or_config: a model, in memory (each rank keeps its part of the weights) or on the meta device (it stays
            there; see `param_init_fn_of`); it is changed in place, and must not have hooks or gradients. Or a config of
            transformers, whose causal language model is then made on the meta device, split, and given the initial
            values that the unsharded one would have from torch's present seed: nothing whole is ever in memory.
        plan: pattern to style, such as {"layers.*.mlp.up_proj": "colwise"}, for a model without a plan, or in place of
            it; see `register_style`. The model's own plan if None.
        sequence_parallel: between attention and feed-forward blocks, keep only `seq/tp` positions on each rank.
        vocabulary_parallel_loss: while the model computes a loss (labels are given), leave the logits split:
            `output.logits` is then `[batch, seq, vocab/tp]`. Without labels, logits are always whole.

    Returns:
        The model. With one tensor-parallel rank it is as it was.

    Raises:
        ValueError: there is no plan, it names a style or a layer that does not exist, heads or sizes cannot be split
            over so many ranks, or the model is one of those that cannot be split without changing its numbers.
        ImportError: a config is given, but transformers is not installed.
    """
    is_config = is_transformers_config(model_or_config)
    model: Any = build_on_meta(model_or_config) if is_config else model_or_config
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model or a config of transformers, not {type(model).__name__}")
    if active_group("tp").size > 1:
        _split(model, plan, sequence_parallel=sequence_parallel)
        if vocabulary_parallel_loss:
            split_loss(model)
    if is_config:
        initialize(model)
    return model


def _split(model: Any, plan: Mapping[str, str] | None, *, sequence_parallel: bool) -> None:
    styles = _styles_of(model, plan)
    tp_size = active_group("tp").size
    functions = {path: style_named(style) for path, style in styles.items()}
    split = [path for path, style in styles.items() if style in _SPLITS_OUTPUTS]
    attentions = heads.attentions(model, split)
    checks.check_plan(model, styles, attentions)
    layouts = {path: heads.layout_of(path, it, model, tp_size) for path, it in attentions.items()}
    region = region_of(model, styles) if sequence_parallel else None  # raises before anything is changed
    ties = guards.ties_of(model)
    done = _split_ends(model)
    for path, layout in layouts.items():
        if not layout.is_plain:
            done |= heads.place(Target(model, path), styles, layout)
    for path, apply in functions.items():
        if path not in done:
            apply(Target(model, path))
    guards.check_ties(model, ties)
    guards.refuse_methods(model)
    draw_alike(model)
    keep_marks_in_copies(model)
    for path, attention in attentions.items():
        heads.tell_counts(path, attention, layouts[path])
    share_inputs(model)
    if region is not None:
        SequenceRegion(model, *region)


def _styles_of(model: Any, plan: Mapping[str, str] | None) -> dict[str, str]:
    if plan is None:
        if not own_plan(model):
            raise ValueError(
                f"{type(model).__name__} has no tensor-parallel plan; give one, such as "
                'plan={"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'
            )
        return named_styles(model, checks.checked_plan(model), must_match=False)
    return named_styles(model, plan, must_match=True)


def _split_ends(model: Any) -> set[str]:
    """Split tied input and output embeddings along the vocabulary together, so that they stay tied; return paths."""
    table, head = input_embeddings(model), output_embeddings(model)
    names = {module: name for name, module in model.named_modules()}
    if isinstance(table, nn.Embedding) and type(head) is nn.Linear and table.weight is head.weight:
        split_table = parallel_embedding(table)
        split_head: ColumnParallelLinear = column_parallel(head, gather_output=True, pad=True)
        split_head.weight = split_table.weight
        Target(model, names[table]).replace(split_table)
        Target(model, names[head]).replace(split_head)
        return {names[table], names[head]}
    return set()
