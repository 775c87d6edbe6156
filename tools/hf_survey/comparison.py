"""One architecture at one layout against one process: loss, gradients, and tokens per expert, in float64.

The functions `one_process` and `one_rank` run on the ranks; what they return is put together by `compare`. The
ranks leave a model's layout to `nxd_layers.hf.parallelize` and `NxDPPModel`, as a user would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from nxd_engine.checkpoints.state import logical_name
from nxd_layers.context import Transport
from nxd_layers.experts import BalanceConfig, RouterBalance
from nxd_layers.hf import find_routers, parallelize
from nxd_optim import GradientReducer, reduce_sequence_parallel_gradients
from nxd_parity import InFloat64
from nxd_pipeline import NxDPPModel
from nxd_pipeline.runtime.microbatches import split_batch
from nxd_state import all_reduce, get_group, initialize_model_parallel
from nxd_testing import LogicalPiece, assemble_logical, logical_pieces
from torch import Tensor

from hf_survey.architectures import SAMPLES, tiny_batch, tiny_model
from hf_survey.vision import VISION_FAMILIES, vision_model
from hf_survey.vision_batch import vision_inputs

RTOL = 1e-10
MICROBATCHES = 2
TEXT_ALONE = ", text alone"  # after the name of a vision-language family: its rows have no pictures


@dataclass(frozen=True)
class Layout:
    """Degrees of tensor, pipeline, expert and context parallelism, and the number of replicas of each expert.

    Attributes:
        transport: of attention over context-parallel ranks; the cheapest if None.
        sp: whether there is sequence parallelism.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    transport: Transport | None = None
    sp: bool = False

    @property
    def num_ranks(self) -> int:
        """How many processes it takes: experts are split over replicas of the other layers."""
        return self.tp * self.pp * self.ep * self.dp * self.cp

    def __str__(self) -> str:
        sizes = (("EP", self.ep), ("CP", self.cp), ("TP", self.tp), ("PP", self.pp), ("DP", self.dp))
        degrees = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) + (" + SP" if self.sp else "")
        return degrees if self.transport is None else f"{degrees}, {self.transport}"


LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2))
EXPERT_LAYOUTS = (
    Layout(ep=2),
    Layout(ep=4),
    Layout(ep=2, tp=2),
    Layout(ep=2, pp=2),
    Layout(ep=2, dp=2),
    Layout(ep=2, tp=2, pp=2),
)
CONTEXT_LAYOUTS = (
    Layout(cp=2, transport="ring"),
    Layout(cp=2, transport="all_gather"),
    Layout(cp=2, transport="all_to_all"),
    Layout(cp=4),
    Layout(cp=2, tp=2),
    Layout(cp=2, pp=2),
)
VISION_LAYOUTS = (*LAYOUTS, Layout(dp=2), Layout(tp=2, sp=True), Layout(cp=2), Layout(cp=2, tp=2))


@dataclass(frozen=True)
class Step:
    """The loss (where this rank has it) and gradients of a step; `refusal` is set instead where there was none.

    Attributes:
        tokens_per_expert: `[layers, experts]`, of all ranks; None where the step was refused.
    """

    loss: Tensor | None = None
    gradients: Sequence[LogicalPiece] = ()
    tokens_per_expert: Tensor | None = None
    refusal: str = ""


def one_process(model_type: str, **changes: Any) -> Step:
    """Forward and backward of the unsharded model, with these keys of its config changed."""
    with InFloat64():
        model = _model(model_type, changes)
        balance = RouterBalance(dict(model.named_modules()), find_routers(model), BalanceConfig())
        losses = balance.train(
            lambda: [model(**part).loss for part in _microbatches(model_type)],
            count=None,
            num_microbatches=MICROBATCHES,
            num_sequences=SAMPLES // MICROBATCHES,
        )
        loss = torch.stack(losses).mean()
        loss.backward()
        named = [(name, p, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return Step(loss.detach(), logical_pieces(named), _tokens(balance))


def one_rank(model_type: str, layout: Layout, changes: Mapping[str, Any]) -> Step:
    """The same step by this rank of a layout.

    A ValueError or NotImplementedError while the model is laid out counts as a refusal: it must come on every rank.
    """
    initialize_model_parallel(layout.tp, layout.pp, layout.ep, context_parallel_size=layout.cp)
    with InFloat64():
        model = _model(model_type, changes)
        routers = find_routers(model)
        replicas = get_group("dp")
        own = _batch(model_type, replicas.rank, replicas.size)
        try:
            if layout.tp * layout.ep * layout.cp > 1:
                model = parallelize(
                    model,
                    expert_parallel=layout.ep > 1,
                    sequence_parallel=layout.sp,
                    context_transport=layout.transport,
                )
            pipeline = NxDPPModel(
                model,
                num_microbatches=MICROBATCHES,
                auto_partition=layout.pp > 1,
                input_names=list(own),
                use_optimizer_wrapper=True,
            )
        except (ValueError, NotImplementedError) as refusal:
            return Step(refusal=str(refusal))
        balance = RouterBalance(dict(pipeline.local_named_modules()), routers, BalanceConfig())
        loss = balance.train(
            lambda: pipeline.run_train(**own),
            count=None,
            num_microbatches=MICROBATCHES,
            num_sequences=SAMPLES // replicas.size // MICROBATCHES,
        )
        GradientReducer(pipeline.local_parameters(), find_unused_parameters=True).finish()
        reduce_sequence_parallel_gradients(pipeline.local_parameters())
        tied = pipeline.tied_names()
        named = [(tied.get(n, n), p, p.grad) for n, p in pipeline.local_named_parameters() if p.grad is not None]
    pieces = [replace(it, name=logical_name(*it.name.partition(":")[::2])) for it in logical_pieces(named)]
    assert not isinstance(loss, list)
    whole_loss = None if loss is None else all_reduce(loss.detach(), replicas, op="avg")
    return Step(whole_loss, pieces, _tokens(balance))


def compare(expected: Step, ranks: Sequence[Step]) -> str:
    """What differs, in words; empty if nothing does.

    Raises:
        ValueError: the one process's loss is not a finite number, so that nothing can be said.
    """
    if expected.loss is None or not bool(expected.loss.isfinite()):
        raise ValueError(f"the loss of one process is {expected.loss}; choose other sizes")
    losses = [step.loss for step in ranks if step.loss is not None]
    for loss in losses:
        if not torch.allclose(loss, expected.loss, rtol=RTOL, atol=0):
            return f"loss {loss.item():.12g} instead of {expected.loss.item():.12g}"
    if not losses:
        return "no rank has the loss"
    counted = [step.tokens_per_expert for step in ranks if step.tokens_per_expert is not None]
    if counted and not all(torch.equal(tokens, _known(expected.tokens_per_expert)) for tokens in counted):
        return "tokens per expert"
    try:
        gradients = assemble_logical([step.gradients for step in ranks], rtol=RTOL)
    except AssertionError as error:
        return str(error)
    wanted = assemble_logical([expected.gradients])
    scale = max(gradient.abs().max().item() for gradient in wanted.values())
    wrong = [
        name for name in wanted.keys() | gradients.keys() if not _equal(gradients.get(name), wanted.get(name), scale)
    ]
    return f"gradient of {_some(wrong)}" if wrong else ""


def _known(tokens: Tensor | None) -> Tensor:
    assert tokens is not None  # of one process
    return tokens


def _tokens(balance: RouterBalance) -> Tensor:
    assert balance.statistics is not None  # a step was taken
    return balance.statistics.tokens_per_expert


def _equal(gradient: Tensor | None, wanted: Tensor | None, scale: float) -> bool:
    """Within RTOL of the tensor's largest element; a zero but for rounding is measured by the model's largest."""
    if gradient is None or wanted is None:  # a parameter that the step does not use may have zeros, too
        return not any(bool(it.any()) for it in (gradient, wanted) if it is not None)
    if gradient.shape != wanted.shape:
        return False
    return torch.allclose(gradient, wanted, rtol=RTOL, atol=max(RTOL * wanted.abs().max().item(), 1e-14 * scale))


def _some(names: Sequence[str] | set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:2]) + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")


def _model(model_type: str, changes: Mapping[str, Any]) -> Any:
    family, _, _ = model_type.partition(TEXT_ALONE)
    return vision_model(family, **changes) if family in VISION_FAMILIES else tiny_model(model_type, **changes)


def _batch(model_type: str, replica: int = 0, num_replicas: int = 1) -> dict[str, Any]:
    """Return a replica's inputs of a step."""
    family, is_text, _ = model_type.partition(TEXT_ALONE)
    if family not in VISION_FAMILIES:
        return {name: it.chunk(num_replicas)[replica] for name, it in tiny_batch(model_type).items()}
    rows = torch.arange(SAMPLES).chunk(num_replicas)[replica].chunk(MICROBATCHES)
    return vision_inputs(family, [it.tolist() for it in rows], pictures=not is_text)


def _microbatches(model_type: str) -> list[dict[str, Any]]:
    return split_batch(_batch(model_type), MICROBATCHES)
