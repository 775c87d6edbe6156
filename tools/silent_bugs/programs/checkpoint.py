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
    """The layers of a pipeline stage, which keep the names of the whole model."""

    def __init__(self, pp: Axis, dp: Axis) -> None:
        super().__init__()
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if self.is_first else None
        own = torch.arange(LAYERS).chunk(pp.size)[pp.rank].tolist()
        self.layers = nn.ModuleDict({str(index): Layer(index, dp) for index in own})
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False) if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states or logits, of tokens or hidden states."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class Trained:
    """A model and its optimizer."""

    def __init__(self, pp: Axis, dp: Axis, dtype: torch.dtype) -> None:
        with default_dtype(dtype):
            self.model = Model(pp, dp)
        fill(self.model, {}, ONE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """Return the checkpoint."""
        named = dict(self.model.named_parameters())
        calls = {
            name: torch.tensor(it.dropout.calls) for name, it in self.model.layers.items() if isinstance(it, Layer)
        }
        return {
            "parameters": {name: it.detach().clone() for name, it in named.items()},
            "momentum": {name: self.optimizer.state[it]["momentum_buffer"].clone() for name, it in named.items()},
            "calls": calls,
        }

    @torch.no_grad()
    def load(self, saved: dict[str, dict[str, Tensor]], pp: Axis, faults: Faults) -> None:
        """Load a checkpoint into this stage."""
        first = min(int(name) for name in self.model.layers)
        others = dict(zip(self.model.layers, reversed(list(self.model.layers)), strict=True))
        for name, parameter in self.model.named_parameters():
            source = of_state = name
            if name.startswith("layers."):
                number = name.split(".")[1]
                if "layers_loaded_by_their_number_in_the_stage" in faults:
                    source = of_state = name.replace(number, str(int(number) - first), 1)
                if "states_loaded_by_number" in faults and pp.size > 1:
                    of_state = name.replace(number, others[number], 1)
            parameter.copy_(saved["parameters"][source])
            if "moments_not_loaded" not in faults:
                self.optimizer.state[parameter]["momentum_buffer"] = saved["momentum"][of_state].clone()
        for name, layer in self.model.layers.items():
            assert isinstance(layer, Layer)
            layer.dropout.calls = int(saved["calls"][name])
            if "random_state_of_the_first_rank" in faults:
                layer.dropout.seed -= first


def _pipeline_step(trained: Trained, tokens: Tensor, labels: Tensor, pp: Axis, dtype: torch.dtype) -> None:
    """Run one batch through the stages and back."""
    x = tokens
    if not trained.model.is_first:
        x = torch.empty(*tokens.shape, HIDDEN, dtype=dtype)
        dist.recv(x, pp.rank - 1)
        x.requires_grad_()
    y = trained.model(x)
    gradient = None
    if trained.model.is_last:
        y = nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())
    else:
        dist.send(y.detach(), pp.rank + 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, pp.rank + 1)
    torch.autograd.backward(y, gradient)
    if not trained.model.is_first:
        assert x.grad is not None
        dist.send(x.grad, pp.rank - 1)


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model]:
    """Train; return the model or stage that this rank trained last."""
    everyone = world()
    before = Trained(ONE, everyone, dtype)
    tokens, labels = batch(1)
    logits = before.model(everyone.part(tokens, 0)).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, everyone.part(labels, 0).flatten(), reduction="sum")
    (losses / (labels >= 0).sum() * everyone.size).backward()
    for parameter in before.model.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(everyone.sum(parameter.grad) / everyone.size)
    before.optimizer.step()
    if steps == 1:
        return (before.model,)
    after = Trained(everyone, ONE, dtype)
    initial = {name: it.detach().clone() for name, it in after.model.named_parameters()}
    after.load(before.saved(), everyone, faults)
    for step in range(2, steps + 1):
        is_late = step == 2 and "loaded_weights_active_a_step_later" in faults
        loaded = {name: it.detach().clone() for name, it in after.model.named_parameters()}
        if is_late:
            after.model.load_state_dict(initial)
        after.optimizer.zero_grad()
        _pipeline_step(after, *batch(step), everyone, dtype)
        if is_late:
            after.model.load_state_dict(loaded)
        after.optimizer.step()
    return (after.model,)


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the parameters of this rank's stage."""
    return {name: it.detach().clone() for name, it in run(faults, dtype, steps)[0].named_parameters()}
