"""`parallelize`: turns an unmodified model of transformers into this rank's part of it.

Operations that would silently go wrong with a split model are fixed or refused: deep copies, which torch makes without
the attributes of parameters, `generate()` on ranks with different seeds, ties that come apart, and methods that take a
part for the whole.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NoReturn

from nxd_state import (
    active_group,
    broadcast,
    copy_parameter_attributes,
    get_mesh,
    get_rng_state,
    set_rng_state,
    splits_experts,
    takes_causal_lm_loss,
    transport_device,
)
from nxd_state.rng import SHARED_STREAM
from torch import nn

from nxd_layers.context import Transport
from nxd_layers.experts import Dispatcher
from nxd_layers.hf import heads
from nxd_layers.hf.context_forward import layers_with_state
from nxd_layers.hf.context_parallel import ContextParallelHooks
from nxd_layers.hf.experts import STYLES as EXPERT_STYLES
from nxd_layers.hf.experts import check_experts, split_experts, use_static_shapes
from nxd_layers.hf.initialization import initialize
from nxd_layers.hf.layers import column_parallel, parallel_embedding
from nxd_layers.hf.loss import split_loss
from nxd_layers.hf.plans import joined, named_styles
from nxd_layers.hf.sequence import SequenceRegion, region_of
from nxd_layers.hf.shared_inputs import share_inputs
from nxd_layers.hf.split_activations import adapt_activations
from nxd_layers.hf.split_dropout import SplitDropout
from nxd_layers.hf.styles import Target, style_named
from nxd_layers.hf.supported_models import (
    check_context,
    check_plan,
    checked_expert_plan,
    checked_plan,
    expert_plan_of,
    plan_of,
)
from nxd_layers.hf.transformers_models import (
    build_on_meta,
    input_embeddings,
    is_transformers_config,
    output_embeddings,
)
from nxd_layers.linear import ColumnParallelLinear

# Styles that leave a layer's outputs split, and with them the heads of an attention.
_SPLITS_OUTPUTS = ("colwise", "packed_colwise", "qkv_colwise")

# Methods that would take parts for the whole, and what to use instead.
_REFUSED_METHODS = {
    "save_pretrained": "save a checkpoint instead (neuronx_distributed.save_checkpoint) and export it (nxd export)",
    "resize_token_embeddings": "resize them before the model is parallelized",
}

_PICKLE_PROTOCOL = 4


def parallelize(
    model_or_config: Any,
    *,
    plan: Mapping[str, str] | Literal["own"] | None = None,
    expert_parallel: bool = False,
    sequence_parallel: bool = False,
    vocabulary_parallel_loss: bool = True,
    context_transport: Transport | None = None,
    expert_dispatcher: Dispatcher | None = None,
) -> Any:
    """Split a model over the tensor-parallel ranks, and its experts over the expert-parallel ones, as its plans say,
    and have it cut its sequences over the context-parallel ones; called by all, after `initialize_model_parallel`.

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
            it; see `register_style`. The model's own plan if None, for the types that have been compared with one
            process; "own" for that of any type, whose numbers are then to be looked at. One that is given also says of
            experts which module has them ("ep_dispatch_experts") and which parameters are theirs ("grouped_gemm").
        expert_parallel: have tokens travel to the ranks of their experts, where the mesh splits experts. Routers stay
            the model's own.
        sequence_parallel: between attention and feed-forward blocks, keep only `seq/tp` positions on each rank.
        vocabulary_parallel_loss: while the model computes a loss (labels are given), leave the logits split:
            `output.logits` is then `[batch, seq, vocab/tp]`. Without labels, logits are always whole.
        context_transport: how keys, values or heads travel where the mesh has context-parallel ranks; the cheapest for
            each mask if None. Each of these ranks gives the model whole sequences, and gets the outputs of its own
            positions (`nxd_layers.context.SequenceCut`), but the loss of all.
        expert_dispatcher: how tokens travel to their experts; the way for their number if None, see
            `nxd_layers.experts.expert_parallel_forward`.

    Returns:
        The model, unchanged if one rank has all of it.

    Raises:
        ValueError: there is no plan, it names a style or a layer that does not exist, heads or sizes cannot be split
            over so many ranks, or the model is one of those that cannot be split without changing its numbers.
        ImportError: a config is given, but transformers is not installed.
    """
    is_config = is_transformers_config(model_or_config)
    model: Any = build_on_meta(model_or_config) if is_config else model_or_config
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model or a config of transformers, not {type(model).__name__}")
    use_static_shapes(model)
    has_known_loss = takes_causal_lm_loss(model)
    if active_group("cp").size > 1 and plan is None:
        check_context(model, has_known_loss=has_known_loss)
    if active_group("cp").size > 1 and sequence_parallel and layers_with_state(model):
        raise ValueError(
            f"sequence_parallel=True cannot be had around {type(layers_with_state(model)[0]).__name__} with "
            "context-parallel ranks; leave sequence_parallel out"
        )
    with_experts = expert_parallel and splits_experts()
    if active_group("tp").size > 1 or with_experts:
        _split(
            model,
            plan,
            with_experts=with_experts,
            sequence_parallel=sequence_parallel,
            expert_dispatcher=expert_dispatcher,
        )
    if active_group("tp").size > 1 and vocabulary_parallel_loss:
        split_loss(model)
    door = None
    if active_group("cp").size > 1:
        multiple = active_group("tp").size if sequence_parallel else 1
        door = ContextParallelHooks(model, context_transport, multiple, has_known_loss=has_known_loss)
    if with_experts or active_group("tp").size * active_group("cp").size > 1:
        _generate_alike(model, door, replicas_wait=with_experts and get_mesh().ep * get_mesh().etp > get_mesh().tp)
        _keep_attributes_in_copies(model)
    if is_config:
        initialize(model)
    return model


def _split(
    model: Any,
    plan: Mapping[str, str] | Literal["own"] | None,
    *,
    with_experts: bool,
    sequence_parallel: bool,
    expert_dispatcher: Dispatcher | None,
) -> None:
    expert_styles = _expert_styles_of(model, plan) if with_experts else {}
    check_experts(model, expert_styles)
    if active_group("tp").size > 1:
        _split_layers(model, plan, expert_styles, sequence_parallel=sequence_parallel)
    split_experts(model, expert_styles, expert_dispatcher)
    _refuse_methods(model)


def _split_layers(
    model: Any,
    plan: Mapping[str, str] | Literal["own"] | None,
    expert_styles: Mapping[str, str],
    *,
    sequence_parallel: bool,
) -> None:
    """Split what the tensor-parallel ranks have parts of; experts among it, unless each stays whole on some rank."""
    styles = _styles_of(model, plan)
    tp_size = active_group("tp").size
    if active_group("etp").size < tp_size:
        styles = {path: style for path, style in styles.items() if not _is_within(path, expert_styles)}
    functions = {path: style_named(style) for path, style in styles.items()}
    split = [path for path, style in styles.items() if style in _SPLITS_OUTPUTS]
    attentions = heads.attentions(model, split)
    check_plan(model, styles, attentions)
    layouts = {path: heads.layout_of(path, it, model, tp_size) for path, it in attentions.items()}
    # Raises before anything is changed.
    region = region_of(model, {**expert_styles, **styles}) if sequence_parallel else None
    ties = _ties_of(model)
    done = _split_ends(model, ties)
    for path, layout in layouts.items():
        if not layout.is_plain:
            done |= heads.place(Target(model, path), styles, layout)
    for path, apply in functions.items():
        if path not in done:
            apply(Target(model, path))
    _check_ties(model, ties)
    for path, attention in attentions.items():
        heads.tell_counts(path, attention, layouts[path])
    share_inputs(model)
    adapt_activations(model, split, styles)
    if active_group("cp").size == 1:  # attention over context-parallel ranks drops by the number of a head
        rows = [path for path, style in styles.items() if style == "rowwise"]
        SplitDropout(model, *[[it for it in paths if not Target(model, it).is_parameter] for paths in (split, rows)])
    if region is not None:
        SequenceRegion(model, *region)


def _is_within(path: str, styles: Mapping[str, str]) -> bool:
    """Whether a path is one of these, or within one of them."""
    return any(f"{path}.".startswith(f"{outer}.") for outer in styles)


def _expert_styles_of(model: Any, plan: Mapping[str, str] | Literal["own"] | None) -> dict[str, str]:
    if isinstance(plan, Mapping):
        given: Mapping[str, str] = plan
    else:
        given = checked_expert_plan(model) if plan is None else expert_plan_of(model)
    of_experts = {pattern: style for pattern, style in given.items() if style in EXPERT_STYLES}
    styles = named_styles(model, of_experts, must_match=isinstance(plan, Mapping))
    if not styles:
        raise ValueError(
            f"{type(model).__name__} has no expert-parallel plan; leave expert_parallel out, or give a plan, such as "
            'plan={"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.down_proj": "grouped_gemm", ...}'
        )
    return styles


def _styles_of(model: Any, plan: Mapping[str, str] | Literal["own"] | None) -> dict[str, str]:
    if plan is None or plan == "own":
        if not plan_of(model):
            raise ValueError(
                f"{type(model).__name__} has no tensor-parallel plan; give one, such as "
                'plan={"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'
            )
        return named_styles(model, checked_plan(model) if plan is None else plan_of(model), must_match=False)
    of_layers = {pattern: style for pattern, style in plan.items() if style not in EXPERT_STYLES}
    return named_styles(model, of_layers, must_match=True)


def _split_ends(model: Any, ties: list[list[str]]) -> set[str]:
    """Split tied input and output embeddings along the vocabulary together, so that they stay tied; return paths.

    A table that more modules share stays whole. A head's bias stays tied to what it is tied to.
    """
    table, head = input_embeddings(model), output_embeddings(model)
    names = {module: name for name, module in model.named_modules()}
    if not (isinstance(table, nn.Embedding) and type(head) is nn.Linear and table.weight is head.weight):
        return set()
    if {joined(names[table], "weight"), joined(names[head], "weight")} not in map(set, ties):
        return set()
    split_table = parallel_embedding(table)
    split_head: ColumnParallelLinear = column_parallel(head, gather_output=True, pad=True)
    split_head.weight = split_table.weight
    Target(model, names[table]).replace(split_table)
    Target(model, names[head]).replace(split_head)
    bias = joined(names[head], "bias")
    for other in (name for tied in ties if bias in tied for name in tied if name != bias):
        path, _, name = other.rpartition(".")
        model.get_submodule(path).register_parameter(name, split_head.bias)
    return {names[table], names[head]}


def _ties_of(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _check_ties(model: nn.Module, ties: list[list[str]]) -> None:
    """Raise a ValueError if names of one parameter are now those of several."""
    for tied in ties:
        if len({model.get_parameter(name) for name in tied}) > 1:
            raise ValueError(
                f"{' and '.join(tied)} are one parameter, but the plan splits them apart; leave them out of the plan, "
                "or untie them. The model is changed already, and cannot be used"
            )


def _refuse_methods(model: nn.Module) -> None:
    """Have methods of transformers that would take this rank's parts for the whole model raise a RuntimeError."""
    for name, instead in _REFUSED_METHODS.items():
        if hasattr(model, name):
            setattr(model, name, _refusal(name, instead))


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    return partial(_refuse, f"{name}() would take this rank's part for the whole model; {instead}")


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(message)


def _generate_alike(model: nn.Module, door: ContextParallelHooks | None, *, replicas_wait: bool) -> None:
    """Have `generate()` begin with the random numbers of the first rank of a model, however they are seeded.

    Args:
        model: of transformers.
        door: where sequences are cut; while it runs, long prompts only.
        replicas_wait: all replicas call it together, and go on until the last of them has all its tokens: a replica
            has experts that others need.
    """
    if hasattr(model, "generate"):
        model.generate = partial(_generate, model, door, replicas_wait)  # type: ignore[assignment]


def _generate(model: Any, door: ContextParallelHooks | None, replicas_wait: bool, *args: Any, **kwargs: Any) -> Any:
    if replicas_wait:
        kwargs["synced_gpus"] = True
    streams = get_rng_state()
    for group in (active_group("tp"), active_group("cp")):
        streams[SHARED_STREAM] = {
            kind: broadcast(state.to(transport_device(group)), group, source=0).cpu()
            for kind, state in streams[SHARED_STREAM].items()
        }
    set_rng_state(streams)
    with nullcontext() if door is None else door.while_generating():
        return type(model).generate(model, *args, **kwargs)


def _keep_attributes_in_copies(model: nn.Module) -> None:
    """Have a deep copy of the model say of its parameters what they say themselves."""
    model.__deepcopy__ = partial(_copied, model)  # type: ignore[assignment]


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    # As copy.deepcopy does where there is no __deepcopy__.
    parts: Any = model.__reduce_ex__(_PICKLE_PROTOCOL)
    make, args, state, *_ = parts
    made: nn.Module = make(*args)
    memo[id(model)] = made
    made.__setstate__(copy.deepcopy(state, memo))
    for parameter in model.parameters():
        copy_parameter_attributes(parameter, memo[id(parameter)])
    return made
