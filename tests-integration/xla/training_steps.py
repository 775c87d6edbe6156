"""Some training steps of a small Llama on whatever device the ranks have: the same code over gloo and on XLA."""

from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction

import torch
from nxd_optim import GradientReducer, NeuronZero1Optimizer, clip_grad_norm, reduce_sequence_parallel_gradients
from nxd_state import get_device, get_group, initialize_model_parallel, move_model_to_device, step_boundary
from nxd_state.testing import LogicalPiece, logical_pieces
from nxd_trainer.models import LlamaConfig, LlamaForCausalLM
from torch import Tensor
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


@dataclass
class Outcome:
    """On one rank: of each step, the mean loss of its microbatches and the norm; gradients of the first step."""

    losses: list[float]
    norms: list[float]
    gradients: list[LogicalPiece]
    weights: list[LogicalPiece]


def train(layout: Layout, steps: int) -> Outcome:
    """Train from one seed; the learning rate is another one in each step."""
    initialize_model_parallel(tensor_model_parallel_size=layout.tp)
    device = get_device()
    torch.manual_seed(0)
    model = move_model_to_device(LlamaForCausalLM(CONFIG, sequence_parallel=layout.sequence_parallel), device)
    optimizer = make_optimizer(model, layout)
    reducer = optimizer if isinstance(optimizer, NeuronZero1Optimizer) else GradientReducer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=steps)
    step_boundary()
    outcome = Outcome([], [], [], [])
    for step in range(steps):
        loss, gradients = accumulate(model, reducer, batches(step, layout.accumulation, device))
        norm = update(model, optimizer, reducer)
        schedule.step()
        step_boundary()
        outcome.losses.append(loss.item())
        outcome.norms.append(norm.item())
        if step == 0 and gradients:
            outcome.gradients = logical_pieces((n, p, gradients[n].cpu()) for n, p in model.named_parameters())
    outcome.weights = logical_pieces((n, p, p.detach().cpu()) for n, p in model.named_parameters())
    return outcome


def make_optimizer(model, layout: Layout):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
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
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def update(model, optimizer, reducer) -> Tensor:
    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.step()
        norm = optimizer.grad_norm
    else:
        norm = clip_grad_norm(model.parameters(), MAX_NORM)
        optimizer.step()
    reducer.zero_grad()
    return norm


def least_bytes(layout: Layout, world_size: int) -> int:
    """What a rank must send for one step, by the rings' count: see `nxd_state.xla_inspect.collectives`.

    Without sequence parallelism an all-reduce of the activations after attention, MLP and embedding forward, and before
    attention, MLP and head backward; with it as many bytes in pairs of all-gather and reduce-scatter, and the norms'
    gradients. For the loss three numbers a token. Over replicas the gradients, once each way. For the gradient's norm
    one number.
    """
    dp = world_size // layout.tp
    tp_share, dp_share = Fraction(layout.tp - 1, layout.tp), Fraction(dp - 1, dp)
    layers, hidden = CONFIG.num_hidden_layers, CONFIG.hidden_size
    tokens = GLOBAL_BATCH // dp * SEQUENCE
    norms = (2 * layers + 1) * hidden
    attention = 2 * hidden * hidden + 2 * CONFIG.num_key_value_heads * CONFIG.head_size * hidden
    matrices = 2 * CONFIG.vocab_size * hidden + layers * (attention + 3 * CONFIG.intermediate_size * hidden)
    over_tp = tokens * hidden * (4 * layers + 2) + 3 * tokens + 1
    if layout.sequence_parallel:
        over_tp += norms // dp if layout.zero1 else norms
    over_dp = matrices // layout.tp + norms + (1 if layout.zero1 else 0)
    return int(2 * 4 * (tp_share * over_tp + dp_share * over_dp))
