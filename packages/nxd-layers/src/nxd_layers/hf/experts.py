"""Expert parallelism of unmodified models of transformers: each rank keeps its experts, and tokens travel to them.

The experts of a layer are parameters `[experts, ...]` of one module, whose forward takes tokens, the experts of each
token and their weights, and computes with the experts, or the shards of them, that it has. Routers stay the model's
own.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from nxd_state import active_group, has_whole_experts
from torch import Tensor, nn

from nxd_layers.experts import (
    Dispatcher,
    dispatch_replicated_tokens,
    needs_static_shapes,
    separate_slots,
    shard_expert_parameter,
)
from nxd_layers.experts.linear import check_expert_tensor_parallel_size
from nxd_layers.hf.layers import mark_partial_gradients
from nxd_layers.hf.plans import EP_DISPATCH, GROUPED_GEMM, join_path
from nxd_layers.hf.static_shapes import runs_every_expert
from nxd_layers.hf.supported_models import SHARED_EXPERTS_LAST
from nxd_layers.hf.transformers_models import model_type_of

_INPUTS = 3  # tokens, experts, weights


def check_experts(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise a ValueError if experts cannot be distributed over the ranks as the plan says."""
    check_expert_tensor_parallel_size()
    for path, style in styles.items():
        parent = path.rpartition(".")[0]
        if style == GROUPED_GEMM and styles.get(parent) != EP_DISPATCH:
            raise ValueError(
                f"{path} has the style {GROUPED_GEMM}, but {parent} does not have {EP_DISPATCH}; give it that style"
            )
    for path in _modules(styles):
        experts = model.get_submodule(path)
        names = _split_parameters(path, experts, styles)
        if not names:
            raise ValueError(
                f"{path} has the style {EP_DISPATCH}, but none of its parameters has {GROUPED_GEMM}; give it to those "
                "with one row per expert"
            )
        numbers = {experts.get_parameter(name).shape[0] for name in names}
        if len(numbers) > 1:
            raise ValueError(
                f"the parameters of {path} with the style {GROUPED_GEMM} have {sorted(numbers)} experts; give the "
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
                f"{join_path(path, left[0])} has one row for each of {number} experts; give it the style {GROUPED_GEMM}"
            )
        if len(inspect.signature(experts.forward).parameters) != _INPUTS:
            raise ValueError(
                f"the forward of {path} ({type(experts).__name__}) does not take tokens, their experts and weights; "
                "leave expert_parallel out"
            )


def distribute_experts(model: nn.Module, styles: Mapping[str, str], dispatcher: Dispatcher | None) -> None:
    """Keep this rank's experts, and have the model send tokens to the ranks that hold their experts.

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
            experts.register_parameter(name, shard_expert_parameter(experts.get_parameter(name)))
        # Each rank applies the other parameters to the tokens of its own experts.
        others = [it for name, it in experts.named_parameters() if name not in names]
        if has_whole_experts():
            mark_partial_gradients(others)
        if hasattr(experts, "num_experts"):
            experts.num_experts = number // active_group("ep").size
        meanwhile = None
        if model_type_of(model) in SHARED_EXPERTS_LAST:
            meanwhile = compute_shared_experts_early(model.get_submodule(path.rpartition(".")[0]))
        experts.forward = _ExpertParallelForward(experts, number, dispatcher, meanwhile)


def _modules(styles: Mapping[str, str]) -> list[str]:
    return [path for path, style in styles.items() if style == EP_DISPATCH]


def _split_parameters(path: str, experts: nn.Module, styles: Mapping[str, str]) -> list[str]:
    return [name for name, _ in experts.named_parameters() if styles.get(join_path(path, name)) == GROUPED_GEMM]


@dataclass(eq=False)
class _ExpertParallelForward:
    """The forward of experts that are distributed over ranks.

    Attributes:
        experts: the module that has this rank's experts.
        num_experts: the number of experts on all ranks.
        dispatcher: how tokens travel, as for `distribute_experts`.
        meanwhile: computes what does not depend on the experts while ranks exchange their counts; see
            `compute_shared_experts_early`.
    """

    experts: nn.Module
    num_experts: int
    dispatcher: Dispatcher | None
    meanwhile: Callable[[], None] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = _signature_of(type(self.experts).forward).bind(self.experts, *args, **kwargs)
        _, hidden_states, top_k_index, top_k_weights = given.arguments.values()
        return dispatch_replicated_tokens(
            self._compute,
            hidden_states,
            top_k_index,
            top_k_weights,
            num_experts=self.num_experts,
            trains_experts=any(it.requires_grad for it in self.experts.parameters()),
            dispatcher=self.dispatcher,
            meanwhile=self.meanwhile,
        )

    def _compute(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute this rank's experts; each token may come with all of its experts (see `expert_parallel_forward`)."""
        forward: Any = type(self.experts).forward
        if needs_static_shapes(tokens) and not runs_every_expert(self.experts):
            own = self.num_experts // active_group("ep").size
            rows: Tensor = forward(self.experts, *separate_slots(tokens, index, weights, own))
            return rows.view(*index.shape, -1).sum(dim=1)
        output: Tensor = forward(self.experts, tokens, index, weights)
        return output


@cache
def _signature_of(forward: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(forward)


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
    return _SharedExpertsOverlap(block, shared).compute if isinstance(shared, nn.Module) else None


class _SharedExpertsOverlap:
    """A block's shared experts, whose output may be computed before the block asks for it."""

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
