"""A step of data parallelism whose checkpoint is loaded by pipeline stages for the next steps, on 2 ranks.

The checkpoint has the parameters, the optimizer's momentum by name, and how often each dropout was called.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from silent_bugs.programs.axis import ONE, Axis, world
from silent_bugs.programs.megatron import Dropout, Faults
from silent_bugs.programs.weights import VOCABULARY, batch, default_dtype, fill

RANKS = 2
HIDDEN = 8
LAYERS = 4


class Layer(nn.Module):
    """A linear layer with dropout."""

    def __init__(self, index: int, dp: Axis) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(HIDDEN, HIDDEN), Dropout(40 + index, 0, dp)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, hidden] of [rows, length, hidden]."""
        return x + self.dropout(torch.tanh(self.linear(x)))


class Model(nn.Module):
    """The whole model, which `become_stage` cuts to a pipeline stage; the layers keep their names."""

    def __init__(self, dp: Axis) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(index): Layer(index, dp) for index in range(LAYERS)})
        self.head: nn.Linear | None = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def become_stage(self, pp: Axis) -> None:
        """Drop what other stages have; rows are no longer split."""
        own = torch.arange(LAYERS).chunk(pp.size)[pp.rank].tolist()
        self.layers = nn.ModuleDict({name: layer for name, layer in self.layers.items() if int(name) in own})
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            layer.dropout.axis = ONE
        if pp.rank > 0:
            self.embedding = None
        if pp.rank < pp.size - 1:
            self.head = None

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states or logits, of tokens or hidden states."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def new_optimizer(model: Model) -> torch.optim.SGD:
    """Return an optimizer without states."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def saved(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return a checkpoint."""
    named = dict(model.named_parameters())
    calls = {name: torch.tensor(it.dropout.calls) for name, it in model.layers.items() if isinstance(it, Layer)}
    return {
        "parameters": {name: it.detach().clone() for name, it in named.items()},
        "momentum": {name: optimizer.state[it]["momentum_buffer"].clone() for name, it in named.items()},
        "calls": calls,
    }


@torch.no_grad()
def load(
    model: Model, optimizer: torch.optim.Optimizer, checkpoint: dict[str, dict[str, Tensor]], pp: Axis, faults: Faults
) -> None:
    """Load a checkpoint into a stage."""
    first = min(int(name) for name in model.layers)
    others = dict(zip(model.layers, reversed(list(model.layers)), strict=True))
    for name, parameter in model.named_parameters():
        source = of_state = name
        if name.startswith("layers."):
            number = name.split(".")[1]
            if "layers_loaded_by_their_number_in_the_stage" in faults:
                source = of_state = name.replace(number, str(int(number) - first), 1)
            if "states_loaded_by_number" in faults and pp.size > 1:
                of_state = name.replace(number, others[number], 1)
        parameter.copy_(checkpoint["parameters"][source])
        if "moments_not_loaded" not in faults:
            optimizer.state[parameter]["momentum_buffer"] = checkpoint["momentum"][of_state].clone()
    for name, layer in model.layers.items():
        assert isinstance(layer, Layer)
        layer.dropout.calls = int(checkpoint["calls"][name])
        if "random_state_of_the_first_rank" in faults:
            layer.dropout.seed -= first


def pipeline_step(model: Model, tokens: Tensor, labels: Tensor, pp: Axis, dtype: torch.dtype) -> None:
    """Run one batch through the stages and back."""
    is_first, is_last = pp.rank == 0, pp.rank == pp.size - 1
    x = tokens
    if not is_first:
        x = torch.empty(*tokens.shape, HIDDEN, dtype=dtype)
        dist.recv(x, pp.rank - 1)
        x.requires_grad_()
    y = model(x)
    gradient = None
    if is_last:
        y = nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())
    else:
        dist.send(y.detach(), pp.rank + 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, pp.rank + 1)
    torch.autograd.backward(y, gradient)
    if not is_first:
        assert x.grad is not None
        dist.send(x.grad, pp.rank - 1)


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model]:
    """Train; return this rank's model, or its stage."""
    everyone = world()
    with default_dtype(dtype):
        model = Model(everyone)
    fill(model, {}, ONE)
    initial = {name: it.detach().clone() for name, it in model.named_parameters()}
    optimizer = new_optimizer(model)
    tokens, labels = batch(1)
    logits = model(everyone.part(tokens, 0)).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, everyone.part(labels, 0).flatten(), reduction="sum")
    (losses / (labels >= 0).sum() * everyone.size).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(everyone.sum(parameter.grad) / everyone.size)
    optimizer.step()
    for step in range(2, steps + 1):
        if step == 2:
            checkpoint = saved(model, optimizer)
            model.become_stage(everyone)
            optimizer = new_optimizer(model)
            load(model, optimizer, checkpoint, everyone, faults)
        loaded = {name: it.detach().clone() for name, it in model.named_parameters()}
        is_late = step == 2 and "loaded_weights_active_a_step_later" in faults
        if is_late:
            model.load_state_dict({name: initial[name] for name in loaded})
        optimizer.zero_grad()
        pipeline_step(model, *batch(step), everyone, dtype)
        if is_late:
            model.load_state_dict(loaded)
        optimizer.step()
    return (model,)


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the parameters of this rank's stage."""
    return {name: it.detach().clone() for name, it in run(faults, dtype, steps)[0].named_parameters()}
