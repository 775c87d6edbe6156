"""Some training steps of a small Llama on whatever device the ranks have: the same code over gloo and on XLA."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_optim import GradientReducer, NeuronZero1Optimizer, clip_grad_norm, reduce_sequence_parallel_gradients
from nxd_state import get_device, get_group, initialize_model_parallel, move_model_to_device, step_boundary
from nxd_testing import LogicalPiece, logical_pieces
from torch import Tensor, nn
from torch.optim import AdamW

GLOBAL_BATCH, SEQUENCE, MAX_NORM = 8, 16, 0.5
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
)


@dataclass(frozen=True)
class Layout:
    """How the steps are spread, and which optimizer does them."""

    tp: int
    sequence_parallel: bool = False
    zero1: bool = False
    accumulation: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None


LAYOUTS = {
    "tp2": (2, Layout(tp=2)),
    "tp2-sp": (2, Layout(tp=2, sequence_parallel=True)),
    "tp4": (4, Layout(tp=4)),
    "tp4-sp": (4, Layout(tp=4, sequence_parallel=True)),
    "dp2": (2, Layout(tp=1)),
    "dp2-zero1": (2, Layout(tp=1, zero1=True)),
    "tp2-dp2": (4, Layout(tp=2)),
    "tp2-dp2-sp": (4, Layout(tp=2, sequence_parallel=True, accumulation=2)),
    "tp2-dp2-zero1": (4, Layout(tp=2, zero1=True)),
    "tp2-dp2-sp-zero1": (4, Layout(tp=2, sequence_parallel=True, zero1=True, accumulation=2)),
    "cp2": (2, Layout(tp=1, cp=2)),
    "cp4-zero1": (4, Layout(tp=1, cp=4, zero1=True)),
    "tp2-cp2-sp": (4, Layout(tp=2, cp=2, sequence_parallel=True, accumulation=2)),
}  # by name: how many ranks, and how they are used


@dataclass
class Outcome:
    """On one rank: of each step, the mean loss of its microbatches and the norm; gradients of the first step."""

    losses: list[float]
    norms: list[float]
    gradients: list[LogicalPiece]
    weights: list[LogicalPiece]


def make_llama(layout: Layout) -> nn.Module:
    """A small Llama."""
    return LlamaForCausalLM(CONFIG, sequence_parallel=layout.sequence_parallel)


def train(layout: Layout, steps: int, make_model: Callable[[Layout], nn.Module] = make_llama) -> Outcome:
    """Train a model from one seed; the learning rate is another one in each step."""
    trainee = make_trainee(layout, make_model)
    schedule = torch.optim.lr_scheduler.LinearLR(trainee.optimizer, start_factor=0.5, total_iters=steps)
    step_boundary()
    outcome, named = Outcome([], [], [], []), trained(trainee.model)
    for step in range(steps):
        loss, gradients, norm = take_step(trainee, layout, step)
        schedule.step()
        step_boundary()
        outcome.losses.append(loss.item())
        outcome.norms.append(norm.item())
        if step == 0 and gradients:
            outcome.gradients = logical_pieces((name, p, gradients[name].cpu()) for name, p in named.items())
    outcome.weights = logical_pieces((n, p, p.detach().cpu()) for n, p in trainee.model.named_parameters())
    return outcome


@dataclass
class Trainee:
    """What training needs on one rank; with ZeRO-1 the optimizer is the reducer."""

    model: nn.Module
    optimizer: AdamW | NeuronZero1Optimizer
    reducer: GradientReducer | NeuronZero1Optimizer


def make_trainee(layout: Layout, make_model: Callable[[Layout], nn.Module]) -> Trainee:
    """On a mesh of its own."""
    initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(0)
    model = move_model_to_device(make_model(layout), get_device())
    optimizer = make_optimizer(model, layout)
    reducer = optimizer if isinstance(optimizer, NeuronZero1Optimizer) else GradientReducer(model.parameters())
    return Trainee(model, optimizer, reducer)


def take_step(trainee: Trainee, layout: Layout, step: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """One step up to its boundary: the loss, gradients as `accumulate` says, and their norm."""
    loss, gradients = accumulate(trainee.model, trainee.reducer, batches(step, layout.accumulation, get_device()))
    return loss, gradients, update(trainee.model, trainee.optimizer, trainee.reducer)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(model, layout: Layout):
    groups = [
        {"params": [p for p in trained(model).values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained(model).values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if layout.zero1:
        return NeuronZero1Optimizer(groups, AdamW, max_norm=MAX_NORM, lr=1e-2, eps=1e-5)
    return AdamW(groups, lr=1e-2, eps=1e-5)


def batches(step: int, accumulation: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """This replica's part of each microbatch: ids and labels."""
    tokens = torch.randint(0, 64, (GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    replicas = get_group("dp")
    own = [part.chunk(replicas.size)[replicas.rank] for part in tokens.chunk(accumulation)]
    return [(part[:, :-1].to(device), part[:, 1:].to(device)) for part in own]


def accumulate(model, reducer, microbatches) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward; the loss, and mean gradients where they are whole before the optimizer's step."""
    losses = []
    for index, (ids, labels) in enumerate(microbatches):
        with reducer.overlap_backward() if index == len(microbatches) - 1 else nullcontext():
            loss = model(ids, labels)
            (loss / len(microbatches)).backward()
        losses.append(loss.detach())
    loss = torch.stack(losses).mean()
    if isinstance(reducer, NeuronZero1Optimizer):
        return loss, {}
    reducer.finish()
    reduce_sequence_parallel_gradients(model.parameters())
    return loss, {name: p.grad.clone() for name, p in trained(model).items()}


def update(model, optimizer, reducer) -> Tensor:
    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.step()
        norm = optimizer.grad_norm
    else:
        norm = clip_grad_norm(model.parameters(), MAX_NORM)
        optimizer.step()
    reducer.zero_grad()
    return norm
