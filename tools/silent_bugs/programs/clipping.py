"""Clipping by the norm of all gradients, on 2 ranks: some are sharded by TP, some experts', some replicated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silent_bugs.programs.axis import Axis, sum_backward, sum_forward, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import VOCABULARY, Shard, batch, default_dtype, fill, shard_of, whole_parameters

RANKS = 2
HIDDEN = 8
LIMIT = 0.05

SHARDS = {"up.weight": Shard(0), "sink": Shard(0), "down.weight": Shard(1), "experts.weight": Shard(0)}


class Experts(nn.Module):
    """This rank's experts; every one of them sees every token, and their outputs are added."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4 // axis.size, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """Return the partial sum over own experts, [rows, length, hidden]."""
        return torch.tanh(torch.einsum("...h,ehk->...ek", x, self.weight)).sum(-2)


class Model(nn.Module):
    """A layer with sinks and experts besides it."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.embedding, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN // axis.size, bias=False)
        self.sink = nn.Parameter(torch.empty(4 * HIDDEN // axis.size))
        self.down = nn.Linear(4 * HIDDEN // axis.size, HIDDEN, bias=False)
        self.experts = Experts(axis)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [rows, length]."""
        x = self.norm(self.embedding(tokens))
        y = sum_backward(x, self.axis)
        partial = self.down(torch.tanh(self.up(y)) + 4 * self.sink) + self.experts(y)
        return self.head(x + sum_forward(partial, self.axis))


def gradient_norm(model: Model, axis: Axis, faults: Faults) -> Tensor:
    """Return the norm of all gradients, in which each parameter counts once."""
    zero = torch.zeros((), dtype=next(model.parameters()).dtype)
    summed, own = zero.clone(), zero.clone()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        is_counted = shard_of(name, SHARDS) is not None or axis.rank == 0
        if "replicated_counted_on_every_rank" in faults and shard_of(name, SHARDS) is None:
            is_counted = True
        if "tied_embedding_counted_twice" in faults and name == "embedding.weight":
            is_counted = True
        if "sinks_counted_on_the_first_rank" in faults and name == "sink":
            is_counted = axis.rank == 0
        if "experts_counted_on_the_first_rank" in faults and name == "experts.weight":
            is_counted = axis.rank == 0
        square = parameter.grad.square().sum()
        is_apart = "expert_norms_not_summed" in faults and name == "experts.weight"
        if is_apart or "norms_averaged" in faults:
            own = own + square
        elif is_counted:
            summed = summed + square
    if "norms_averaged" in faults:
        return axis.sum(own.sqrt()) / axis.size
    return (axis.sum(summed) + own).sqrt()


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model, Axis]:
    """Train; return this rank's model and the axis that shards it."""
    axis = world()
    with default_dtype(dtype):
        model = Model(axis)
    fill(model, SHARDS, axis)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(1, steps + 1):
        tokens, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, gradient_norm(model, axis, faults))
        optimizer.step()
    return model, axis


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    model, axis = run(faults, dtype, steps)
    return whole_parameters(model, SHARDS, axis)
