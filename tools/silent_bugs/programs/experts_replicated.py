"""A mixture of experts whose ranks all have every token and add up their own experts' outputs, on 2 ranks.

The router and all other layers run alike on every rank. A rank's gradients of the probabilities and of the experts'
input cover its own experts only, and are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silent_bugs.programs.axis import Axis, sum_backward, sum_forward, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import VOCABULARY, Shard, batch, default_dtype, fill, whole_parameters

RANKS = 2
HIDDEN = 8
EXPERTS = 4

SHARDS = {"*.experts.*": Shard(0)}


class Experts(nn.Module):
    """This rank's experts, stacked."""

    def __init__(self, ep: Axis) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS // ep.size, HIDDEN, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS // ep.size, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, probabilities: Tensor) -> Tensor:
        """Return the sum over own experts, [tokens, hidden], of x [tokens, hidden] and [tokens, own experts]."""
        hidden = torch.tanh(torch.einsum("th,ehk->tek", x, self.up))
        return torch.einsum("tek,ekh,te->th", hidden, self.down, probabilities)


class Mixture(nn.Module):
    """A router and the experts of all ranks."""

    def __init__(self, ep: Axis, faults: Faults) -> None:
        super().__init__()
        self.ep, self.faults = ep, faults
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(ep)

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, hidden] of [tokens, hidden]."""
        probabilities = self.router(x).softmax(-1)
        picked, chosen = probabilities.topk(2, -1)
        weights = torch.zeros_like(probabilities).scatter(1, chosen, picked)
        if "router_gradients_of_own_experts" not in self.faults:
            weights = sum_backward(weights, self.ep)
        if "expert_input_gradients_of_own_experts" not in self.faults:
            x = sum_backward(x, self.ep)
        return sum_forward(self.experts(x, self.ep.part(weights, 1)), self.ep)


class Model(nn.Module):
    """An embedding, two mixtures with norms, and a head."""

    def __init__(self, ep: Axis, faults: Faults) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.layers = nn.ModuleList(Mixture(ep, faults) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [rows, length], [tokens, vocabulary]."""
        x = self.embedding(tokens).flatten(0, 1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model, Axis]:
    """Train; return this rank's model and the axis of the experts."""
    ep = world()
    with default_dtype(dtype):
        model = Model(ep, faults)
    fill(model, SHARDS, ep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(1, steps + 1):
        tokens, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), labels.flatten()).backward()
        optimizer.step()
    return model, ep


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    model, ep = run(faults, dtype, steps)
    return whole_parameters(model, SHARDS, ep)
