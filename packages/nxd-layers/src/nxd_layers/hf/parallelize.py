"""`parallelize`: turns an unmodified model of transformers into this rank's shard of it.

It checks everything first, and then applies one pass after the other, each once. The last one prevents operations that
would silently go wrong with a sharded model: deep copies, which torch makes without the attributes of parameters,
`generate()` on ranks with different seeds, and methods that would take a shard for the full model.
"""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

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
from nxd_layers.hf.context_parallel import ContextParallelHooks, check_sequences, cuts_sequences
from nxd_layers.hf.experts import check_experts, distribute_experts
from nxd_layers.hf.initialization import initialize
from nxd_layers.hf.loss import WholeLogits, check_vocabulary_parallel_loss, use_vocabulary_parallel_loss
from nxd_layers.hf.plans import Plan, expert_styles, layer_styles
from nxd_layers.hf.static_shapes import use_static_shapes
from nxd_layers.hf.supported_models import check_context_parallel
from nxd_layers.hf.tensor_parallel import check_layers, shard_layers
from nxd_layers.hf.transformers_models import build_on_meta, is_transformers_config

# Methods that would take a shard for the full model, and what to use instead.
_REFUSED_METHODS = {
    "save_pretrained": "save a checkpoint instead (neuronx_distributed.save_checkpoint) and export it (nxd export)",
    "resize_token_embeddings": "resize them before the model is parallelized",
}

_PICKLE_PROTOCOL = 4


def parallelize(
    model_or_config: Any,
    *,
    plan: Plan = None,
    expert_parallel: bool = False,
    sequence_parallel: bool = False,
    vocabulary_parallel_loss: bool | WholeLogits = True,
    context_transport: Transport | None = None,
    expert_dispatcher: Dispatcher | None = None,
) -> Any:
    """Shard a model over the tensor-parallel ranks and distribute its experts over the expert-parallel ranks, by its
    plans, and have it split its sequences over the context-parallel ranks. Call it on all ranks, after
    `initialize_model_parallel`.

    Linears and embeddings become parallel layers, experts keep a shard of each of their parameters, and the head counts
    of attention modules become those of this rank. The names of modules and parameters stay, and so do the model's
    class, its forward and `generate()`. Every sharded parameter has a `ShardSpec`, whose logical tensor has the name
    and shape of the unsharded parameter. A full parameter whose gradient is partial on each rank has
    `sequence_parallel_enabled`; the optimizer must sum its gradient over the ranks, as `nxd_optim` does.

    Args:
        model_or_config: a model, in memory (each rank keeps its shards of the weights) or on the meta device (it stays
            there; see `param_init_fn_of`); it is changed in place, and must not have hooks or gradients. Or a config of
            transformers, whose causal language model is then built on the meta device, sharded, and given the initial
            values that the unsharded one would have from torch's current seed: the full model is never in memory.
        plan: the style of each pattern, such as {"layers.*.mlp.up_proj": "colwise"}; see `register_style`. If None, the
            model's own plan, if models of its type have been compared with one process; "own" for the model's own plan
            even if they have not: compare the numbers yourself. A given plan also names the modules of experts
            ("ep_dispatch_experts") and their parameters ("grouped_gemm").
        expert_parallel: send tokens to the ranks of their experts, where the mesh distributes experts. Routers stay
            the model's own.
        sequence_parallel: keep only `seq/tp` positions on each rank between attention and feed-forward blocks.
        vocabulary_parallel_loss: leave the logits sharded while the model computes a loss (labels are given):
            `output.logits` is then `[batch, seq, vocab/tp]`. Without labels, logits are always full. "whole_logits"
            gathers them after the loss, so that metrics and further losses see `[batch, seq, vocab]`; gradients flow
            through both.
        context_transport: how keys, values or heads travel between context-parallel ranks; the cheapest way for each
            mask if None. Each of these ranks passes full sequences to the model, and receives the outputs of its own
            positions (`nxd_layers.context.SequenceCut`) and the loss of all positions.
        expert_dispatcher: how tokens travel to their experts; chosen from the numbers of experts and ranks if None, see
            `nxd_layers.experts.expert_parallel_forward`.

    Returns:
        The model, unchanged if there is only one rank.

    Raises:
        ValueError: there is no plan, it names an unknown style or layer, heads or sizes cannot be sharded over this
            number of ranks, or sharding would change the model's numbers. The model is then unchanged.
        ImportError: a config is given, but transformers is not installed.
    """
    is_config = is_transformers_config(model_or_config)
    model: Any = build_on_meta(model_or_config) if is_config else model_or_config
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model or a config of transformers, not {type(model).__name__}")
    tp_size, cp_size = active_group("tp").size, active_group("cp").size
    with_experts = expert_parallel and splits_experts()

    # Checks: nothing of the model changes before the last of them.
    check_vocabulary_parallel_loss(vocabulary_parallel_loss)
    has_known_loss = takes_causal_lm_loss(model)
    if cp_size > 1:
        if cuts_sequences(model):
            raise ValueError(
                f"{type(model).__name__} splits its sequences already; call parallelize() once, with an unsharded model"
            )
        if plan is None:
            check_context_parallel(model, has_known_loss=has_known_loss)
        check_sequences(model, sequence_parallel=sequence_parallel)
    styles_of_experts = expert_styles(model, plan) if with_experts else {}
    check_experts(model, styles_of_experts)
    layers = None
    if tp_size > 1:
        styles = layer_styles(model, plan)
        layers = check_layers(model, styles, styles_of_experts, sequence_parallel=sequence_parallel)

    # Passes. Experts come after layers, which may shard them too; sequences are split around all of it.
    use_static_shapes(model)
    if layers is not None:
        shard_layers(model, layers)
    distribute_experts(model, styles_of_experts, expert_dispatcher)
    if tp_size > 1 and vocabulary_parallel_loss:
        use_vocabulary_parallel_loss(model, whole_logits=vocabulary_parallel_loss == "whole_logits")
    context = None
    if cp_size > 1:
        multiple = tp_size if sequence_parallel else 1
        context = ContextParallelHooks(model, context_transport, multiple, has_known_loss=has_known_loss)
    if tp_size > 1 or with_experts:
        _refuse_methods(model)
    if tp_size * cp_size > 1 or with_experts:
        _generate_alike(model, context, replicas_wait=with_experts and get_mesh().experts_span_replicas)
        _keep_attributes_in_copies(model)
    if is_config:
        initialize(model)
    return model


def _refuse_methods(model: nn.Module) -> None:
    """Make methods of transformers that would take a shard for the full model raise a RuntimeError."""
    for name, instead in _REFUSED_METHODS.items():
        if hasattr(model, name):
            message = f"{name}() would take this rank's shard for the full model; {instead}"
            setattr(model, name, partial(_refuse, message))


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(message)


def _generate_alike(model: nn.Module, context: ContextParallelHooks | None, *, replicas_wait: bool) -> None:
    """Have `generate()` start from the random state of a model's first rank, however the ranks are seeded.

    Args:
        model: a model of transformers.
        context: the hooks that split its sequences; `generate()` splits long prompts only.
        replicas_wait: whether all replicas call it together and continue until the last one has all its tokens,
            because replicas hold each other's experts.
    """
    if hasattr(model, "generate"):
        model.generate = partial(_generate, model, context, replicas_wait)  # type: ignore[assignment]


def _generate(model: Any, context: ContextParallelHooks | None, replicas_wait: bool, *args: Any, **kwargs: Any) -> Any:
    if replicas_wait:
        kwargs["synced_gpus"] = True
    streams = get_rng_state()
    for group in (active_group("tp"), active_group("cp")):
        streams[SHARED_STREAM] = {
            kind: broadcast(state.to(transport_device(group)), group, source=0).cpu()
            for kind, state in streams[SHARED_STREAM].items()
        }
    set_rng_state(streams)
    with nullcontext() if context is None else context.while_generating():
        return type(model).generate(model, *args, **kwargs)


def _keep_attributes_in_copies(model: nn.Module) -> None:
    """Have deep copies of the model keep the attributes of its parameters."""
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
