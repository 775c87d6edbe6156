"""Low-rank adapters on frozen layers under tensor parallelism with sequence parallelism, on 2 ranks.

Activations between layers are [rows, length/tp, hidden]. The factor of an adapter that is not sharded sees a part of
the sequence, and its gradients are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silent_bugs.programs.axis import Axis, gather, linear, reduce_scatter, split, sum_forward, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import (
    VOCABULARY,
    Shard,
    batch,
    default_dtype,
    fill,
    shard_of,
    whole_parameters,
    whole_weight,
)

RANKS = 2
HIDDEN = 8
RANK_OF_ADAPTERS = 4

SHARDS = {
    "fc1.weight": Shard(0),
    "fc1.lora_b.weight": Shard(0),
    "fc2.weight": Shard(1),
    "fc2.lora_a.weight": Shard(1),
    "head.weight": Shard(0),
}


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Adapted(nn.Module):
    """A frozen weight [out, in] and the two factors of its adapter, with local sizes."""

    def __init__(self, inputs: int, outputs: int, tp: Axis, faults: Faults) -> None:
        super().__init__()
        self.tp, self.faults = tp, faults
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.lora_a, self.lora_b = _linear(inputs, RANK_OF_ADAPTERS), _linear(RANK_OF_ADAPTERS, outputs)


class ColumnAdapted(Adapted):
    """A column-parallel layer: the second factor is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, out/tp] of [rows, length/tp, in]."""
        return nn.functional.linear(gather(x, 1, self.tp), self.weight) + self.lora_b(
            gather(self.lora_a(x), 1, self.tp)
        )


class RowAdapted(Adapted):
    """A row-parallel layer: the first factor is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length/tp, out] of [rows, length, in/tp]."""
        partial = nn.functional.linear(x, self.weight)
        if "adapter_added_before_the_sum" in self.faults:
            return reduce_scatter(partial + self.lora_b(sum_forward(self.lora_a(x), self.tp)), 1, self.tp)
        return reduce_scatter(partial, 1, self.tp) + self.lora_b(reduce_scatter(self.lora_a(x), 1, self.tp))


class DuplicatedAdapted(Adapted):
    """A layer that every rank has whole, for its part of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length/tp, out] of [rows, length/tp, in]."""
        features = self.lora_a(x)
        if "adapter_features_of_other_tokens" in self.faults:
            features = linear(features, self._joined, lambda gradient: gradient)
        return nn.functional.linear(x, self.weight) + self.lora_b(features)

    def _joined(self, features: Tensor) -> Tensor:
        """Join each rank's part of the features; the ranks have different tokens."""
        ranks = self.tp.gather_list(features)
        return torch.cat([part.chunk(self.tp.size, -1)[rank] for rank, part in enumerate(ranks)], -1)


class Model(nn.Module):
    """An embedding, three adapted layers and a head; only adapters, norms and the head train."""

    def __init__(self, tp: Axis, faults: Faults) -> None:
        super().__init__()
        self.tp, self.faults = tp, faults
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
        self.down = DuplicatedAdapted(HIDDEN, HIDDEN, tp, faults)
        self.fc1 = ColumnAdapted(HIDDEN, 2 * HIDDEN // tp.size, tp, faults)
        self.fc2 = RowAdapted(2 * HIDDEN // tp.size, HIDDEN, tp, faults)
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = _linear(HIDDEN, VOCABULARY // tp.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [rows, length], on every rank."""
        x = split(self.embedding(tokens), 1, self.tp)
        x = x + torch.tanh(self.down(x))
        x = self.norm(x + self.fc2(torch.tanh(self.fc1(x))))
        if "input_gradient_summed_twice" in self.faults:
            tp = self.tp
            x = linear(x, lambda y: tp.gather(y, 1), lambda g: tp.part(tp.sum(tp.sum(g)), 1).contiguous())
        else:
            x = gather(x, 1, self.tp)
        logits = self.head(x)
        return linear(logits, lambda y: self.tp.gather(y, -1), lambda g: self.tp.part(g, -1).contiguous())


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model, Axis]:
    """Train; return this rank's model and the axis that shards it."""
    tp = world()
    with default_dtype(dtype):
        model = Model(tp, faults)
    fill(model, SHARDS, tp)
    if "adapters_initialized_differently" in faults and tp.rank > 0:
        weight = model.fc1.lora_a.weight
        weight.data.copy_(whole_weight(f"of rank {tp.rank}", weight.shape, dtype))
    trains = {name: it for name, it in model.named_parameters() if it.requires_grad}
    optimizer = torch.optim.SGD(trains.values(), lr=0.1, momentum=0.9)
    for step in range(1, steps + 1):
        tokens, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        for name, parameter in trains.items():
            assert parameter.grad is not None
            is_adapter = ".lora_" in name
            if shard_of(name, SHARDS) is None and not (
                is_adapter and "replicated_factor_gradients_not_summed" in faults
            ):
                parameter.grad.copy_(tp.sum(parameter.grad))
        optimizer.step()
    return model, tp


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    model, tp = run(faults, dtype, steps)
    return whole_parameters(model, SHARDS, tp)
