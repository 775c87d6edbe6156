"""Experts of unmodified models of transformers, and the routers that choose among them.

The experts of a layer are parameters `[experts, ...]` of one module, whose forward takes tokens, the experts of each
token and their weights, and computes with the experts, or the shards of them, that it has. Expert parallelism keeps
this rank's experts and sends tokens to the ranks of theirs; tensor parallelism shards every expert. Routers stay the
model's own.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from nxd_state import active_group, has_dynamic_shapes, has_whole_experts
from torch import Tensor, nn

from nxd_layers.experts import (
    Dispatcher,
    RouterBase,
    RouterLayer,
    dispatch_replicated_tokens,
    needs_static_shapes,
    rows_of_experts,
    separate_slots,
    shard_experts,
    weights_of_experts,
)
from nxd_layers.experts.linear import check_expert_tensor_parallel_size
from nxd_layers.hf.layers import mark_partial_gradients
from nxd_layers.hf.plans import join_path
from nxd_layers.hf.transformers_models import (
    is_transformers_model,
    look_for_documents_by,
    model_type_of,
    register_experts,
    router_class,
    text_config,
)
from nxd_layers.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region

DISPATCH = "ep_dispatch_experts"  # the style of the module
SPLIT_EXPERTS = "grouped_gemm"  # the style of its parameters
STYLES = (DISPATCH, SPLIT_EXPERTS)

_INPUTS = 3  # tokens, experts, weights

# Model types whose blocks call `shared_experts` once, after the routed experts, with the block's own input. Neither
# configs nor registries of transformers say so; tests-integration/hugging_face calls a block of each type.
SHARED_EXPERTS_LAST = frozenset(
    [
        *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1"),
        *("dots3_note_text", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear"),
        *("kolibri1", "nemotron_h", "sarvam_mla", "sarvam_moe", "solar_open"),
    ]
)

EVERY_EXPERT = "nxd_every_expert"
_OF_DYNAMIC_SHAPES = ("eager", "grouped_mm")

_BIAS = "e_score_correction_bias"
# Some routers choose among more than the experts: ZAYA's have a class for no expert, LongCat's have experts that return
# their input.
_NUM_CHOICES = ("num_router_classes", "n_routed_experts", "num_experts")


def check_experts(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise a ValueError where experts cannot be distributed as a plan asks."""
    check_expert_tensor_parallel_size()
    for path, style in styles.items():
        parent = path.rpartition(".")[0]
        if style == SPLIT_EXPERTS and styles.get(parent) != DISPATCH:
            raise ValueError(
                f"{path} has the style {SPLIT_EXPERTS}, but {parent} does not have {DISPATCH}; give it that style"
            )
    for path in _modules(styles):
        experts = model.get_submodule(path)
        names = _split_parameters(path, experts, styles)
        if not names:
            raise ValueError(
                f"{path} has the style {DISPATCH}, but none of its parameters has {SPLIT_EXPERTS}; give it to those "
                "with one row per expert"
            )
        numbers = {experts.get_parameter(name).shape[0] for name in names}
        if len(numbers) > 1:
            raise ValueError(
                f"the parameters of {path} with the style {SPLIT_EXPERTS} have {sorted(numbers)} experts; give the "
                "style only to parameters with the same number of experts"
            )
        number, size = numbers.pop(), active_group("ep").size
        if number % size:
            raise ValueError(
                f"expert_model_parallel_size={size} does not divide the {number} experts of {path}; use a degree that "
                "does"
            )
        left = [name for name, it in experts.named_parameters() if name not in names and it.shape[:1] == (number,)]
        if left:
            raise ValueError(
                f"{join_path(path, left[0])} has one row for each of {number} experts; give it the style "
                f"{SPLIT_EXPERTS}"
            )
        if len(inspect.signature(experts.forward).parameters) != _INPUTS:
            raise ValueError(
                f"the forward of {path} ({type(experts).__name__}) does not take tokens, their experts and weights; "
                "leave expert_parallel out"
            )


def split_experts(model: nn.Module, styles: Mapping[str, str], dispatcher: Dispatcher | None) -> None:
    """Keep this rank's experts, and send tokens to the ranks of theirs.

    Args:
        model: a model that has all experts, or this rank's shard of each where tensor-parallel ranks shard them.
        styles: as for `check_experts`.
        dispatcher: how tokens travel, as for `nxd_layers.experts.expert_parallel_forward`.
    """
    for path in _modules(styles):
        experts: Any = model.get_submodule(path)
        names = _split_parameters(path, experts, styles)
        number = experts.get_parameter(names[0]).shape[0]
        for name in names:
            experts.register_parameter(name, shard_experts(experts.get_parameter(name)))
        # Each rank applies the other parameters to the tokens of its own experts.
        others = [it for name, it in experts.named_parameters() if name not in names]
        if has_whole_experts():
            mark_partial_gradients(others)
        if hasattr(experts, "num_experts"):
            experts.num_experts = number // active_group("ep").size
        early = None
        if model_type_of(model) in SHARED_EXPERTS_LAST:
            early = compute_shared_experts_early(model.get_submodule(path.rpartition(".")[0]))
        experts.forward = partial(_forward, experts, number, dispatcher, early)


def _modules(styles: Mapping[str, str]) -> list[str]:
    return [path for path, style in styles.items() if style == DISPATCH]


def _split_parameters(path: str, experts: nn.Module, styles: Mapping[str, str]) -> list[str]:
    return [name for name, _ in experts.named_parameters() if styles.get(join_path(path, name)) == SPLIT_EXPERTS]


@cache
def _signature_of(forward: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(forward)


def _forward(
    experts: Any,
    number: int,
    dispatcher: Dispatcher | None,
    early: Callable[[], None] | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    given = _signature_of(type(experts).forward).bind(experts, *args, **kwargs)
    _, hidden_states, top_k_index, top_k_weights = given.arguments.values()
    return dispatch_replicated_tokens(
        partial(_compute, experts, number // active_group("ep").size),
        hidden_states,
        top_k_index,
        top_k_weights,
        num_experts=number,
        trains_experts=any(it.requires_grad for it in experts.parameters()),
        dispatcher=dispatcher,
        meanwhile=early,
    )


def _compute(experts: Any, number: int, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute this rank's experts; each token may come with all of its experts (see `expert_parallel_forward`)."""
    knows_none = _implementation_of(getattr(experts, "config", None)) == EVERY_EXPERT
    if needs_static_shapes(tokens) and not knows_none:
        rows = type(experts).forward(experts, *separate_slots(tokens, index, weights, number))
        return rows.view(*index.shape, -1).sum(dim=1)
    return type(experts).forward(experts, tokens, index, weights)


def compute_shared_experts_early(block: nn.Module) -> Callable[[], None] | None:
    """Let a block's shared experts be computed while ranks exchange how many tokens they will send.

    The result is used where the block calls its shared experts with its own input, and is otherwise dropped, so that
    the block's outputs are those of its own order. The order depends on the block alone: it is the same on all ranks,
    and when activation checkpointing runs the block again.

    Args:
        block: the block of `shared_experts` and routed experts; hidden states are its first argument.

    Returns:
        A function that computes the shared experts, for `meanwhile` of the dispatch; None if the block has none.
    """
    shared = getattr(block, "shared_experts", None)
    return _Early(block, shared).compute if isinstance(shared, nn.Module) else None


class _Early:
    def __init__(self, block: nn.Module, shared: Any) -> None:
        self._shared, self._forward = shared, shared.forward
        self._input: Tensor | None = None  # the input of the block that is being computed
        self._output: Tensor | None = None
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        shared.forward = self._take

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._input, self._output = next(iter((*args, *kwargs.values())), None), None

    def compute(self) -> None:
        if self._input is not None and not self._shared._forward_pre_hooks:  # hooks may change the input
            self._output = self._forward(self._input)

    def _take(self, *args: Any, **kwargs: Any) -> Any:
        output, given = self._output, self._input
        self._output = self._input = None
        if output is not None and not kwargs and len(args) == 1 and args[0] is given:
            return output
        return self._forward(*args, **kwargs)


def sum_over_shards(experts: nn.Module) -> None:
    """Sum the outputs of experts that tensor-parallel ranks shard, and the gradients of their inputs.

    Inputs, the router's weights included, are full on every rank. The experts' parameters have styles of their own.
    """
    experts.register_forward_pre_hook(_copied, with_kwargs=True)
    experts.register_forward_hook(_summed)


def divide_input(expert: nn.Module) -> None:
    """Have an expert that returns its input, among experts whose outputs are summed, return 1/tp of it on each rank."""
    expert.register_forward_pre_hook(_divided)


def _copied(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tuple(map(_copy, args)), {name: _copy(value) for name, value in kwargs.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return copy_to_tensor_model_parallel_region(value)
    return value


def _summed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(output)


def _divided(module: nn.Module, args: Any) -> tuple[Any, ...]:
    return (args[0] / active_group("tp").size, *args[1:])


def find_routers(model: nn.Module) -> dict[str, RouterLayer]:
    """Return the routers of an unsharded model by name, in the order of its layers.

    A router of transformers is found by what the model says of the outputs it can record. Routers whose number of
    experts is unknown, and those that return their logits in another place than the first, are not returned.
    """
    recorded = router_class(model)
    found: dict[str, RouterLayer] = {}
    for path, module in model.named_modules():
        is_own = isinstance(module, RouterBase)
        if not (is_own or (recorded is not None and isinstance(module, recorded))):
            continue
        num_experts = next((it for name in _NUM_CHOICES if (it := getattr(module, name, None))), None)
        if num_experts is None and isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            num_experts = weight.shape[0]
        top_k = getattr(module, "top_k", None) or getattr(text_config(model), "num_experts_per_tok", None)
        if isinstance(num_experts, int) and isinstance(top_k, int):
            found[path] = RouterLayer(num_experts, top_k, _bias_of(model, path, num_experts), keeps_order=not is_own)
    return found


def _bias_of(model: nn.Module, router: str, num_experts: int) -> str | None:
    """Return the path of the router's bias, which is in the router or in the block around it."""
    block = router.rpartition(".")[0]
    for outer in (router, block):
        module = model.get_submodule(outer)
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            if name.rpartition(".")[2] == _BIAS and tensor.numel() == num_experts:
                return join_path(outer, name)
    return None


def use_static_shapes(model: nn.Module) -> None:
    """Have a model compute in static shapes if the device of this process needs that (XLA, Neuron).

    Of the implementations of experts in transformers, "eager" and "grouped_mm" read how many tokens an expert has, and
    "batched_mm" copies an expert's weights for each token. Here each expert computes all tokens, so that the outputs
    take `experts * tokens` rows. Experts whose config names another implementation keep it. From then on, the masks of
    all models are made without a look at whether rows hold several documents.

    Args:
        model: a model; only those of transformers are changed.
    """
    if has_dynamic_shapes() or not is_transformers_model(model):
        return
    look_for_documents_by(_documents)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "is_transposed") and _implementation_of(config) in _OF_DYNAMIC_SHAPES:
            register_experts(EVERY_EXPERT, _every_expert)
            config._experts_implementation = EVERY_EXPERT


def _implementation_of(config: Any) -> str | None:
    return getattr(config, "_experts_implementation", None)


def _documents(position_ids: Tensor) -> Tensor:
    """Return the number of each position's document in its row, `[batch, seq]`, even if each row is one document."""
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=1) != 1
    return begins.cumsum(dim=1)


def _every_expert(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, `[tokens, hidden]`.

    Args:
        experts: the module, with weights `[experts, out, in]`, or transposed.
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, k]`; the number of experts stands for none.
        top_k_weights: `[tokens, k]`.
    """
    weights = weights_of_experts(top_k_index, top_k_weights, len(experts.down_proj))
    rows = rows_of_experts(hidden_states, weights)
    inner = _products(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = _products(experts, "down_proj", inner)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    return (outputs * weights.t().unsqueeze(-1)).sum(dim=0).to(hidden_states.dtype)


def _products(experts: Any, name: str, rows: Tensor) -> Tensor:
    """Multiply `[tokens, in]` or `[experts, tokens, in]` by each expert's weight: `[experts, tokens, out]`."""
    weight: Tensor = getattr(experts, name)
    products = rows @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return products + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else products
