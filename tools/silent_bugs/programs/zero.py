"""Hand-written ZeRO stage 1 on 2 ranks: each rank's AdamW holds the states of its partition of one flat vector.

Gradients of two microbatches are averaged over ranks; after the step the partitions are gathered. Before the second
step the states are saved whole and loaded again. One layer is used twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from silent_bugs.programs.axis import ONE, Axis, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import VOCABULARY, batch, default_dtype, fill, whole_parameters

RANKS = 2
HIDDEN = 6
ALIGNMENT = 8  # partitions have a multiple of this many elements


class Model(nn.Module):
    """An embedding, a layer that is used twice, one that is used once, and a head."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.fc = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [rows, length]."""
        x = self.embedding(tokens)
        if "shared_layer_gradient_of_one_use" in self.faults:
            frozen = {name: parameter.detach() for name, parameter in self.shared.named_parameters()}
            x = torch.tanh(functional_call(self.shared, frozen, (x,)))
        else:
            x = torch.tanh(self.shared(x))
        x = x + torch.tanh(self.fc(x))
        return self.head(torch.tanh(self.shared(x)))


class PartitionedAdamW:
    """AdamW over this rank's partition of all parameters, laid out one after the other."""

    def __init__(self, model: nn.Module, dp: Axis, faults: Faults) -> None:
        self.parameters, self.dp, self.faults = list(model.parameters()), dp, faults
        self.late = [] if "late_gather" not in faults else [id(it) for it in model.get_submodule("shared").parameters()]
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        unit = ALIGNMENT * dp.size
        self.padded = -(-self.numel // unit) * unit
        self.partition = nn.Parameter(dp.part(self._flat([it.detach() for it in self.parameters]), 0).clone())
        self.optimizer = torch.optim.AdamW([self.partition], lr=0.02, weight_decay=0.1)
        self.pending: list[tuple[Tensor, Tensor]] = []

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.cat([flat, flat.new_zeros(self.padded - self.numel)])

    def reduce_gradients(self) -> None:
        """Average the gradients over the ranks."""
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(self.dp.sum(parameter.grad) / self.dp.size)

    @torch.no_grad()
    def step(self) -> None:
        """Step on this rank's partition, and gather the parameters."""
        self.partition.grad = self.dp.part(self._flat([it.grad for it in self.parameters if it.grad is not None]), 0)
        self.optimizer.step()
        partitions = self.dp.gather_list(self.partition)
        if "partitions_copied_to_the_first" in self.faults and self.dp.size > 1:
            partitions[1] = self._flat([it.detach() for it in self.parameters]).chunk(self.dp.size)[1]
        values = torch.cat(partitions)[: self.numel].split([it.numel() for it in self.parameters])
        for parameter, value in zip(self.parameters, values, strict=True):
            if id(parameter) in self.late:
                self.pending.append((parameter, value.view_as(parameter)))
            else:
                parameter.copy_(value.view_as(parameter))

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Copy the parameters that were still being gathered."""
        for parameter, value in self.pending:
            parameter.copy_(value)
        self.pending.clear()

    @torch.no_grad()
    def reload(self) -> None:
        """Save the states whole, and load them."""
        state = self.optimizer.state[self.partition]
        for key in ("exp_avg", "exp_avg_sq"):
            partitions = self.dp.gather_list(state[key])
            if "partitions_merged_in_another_order" in self.faults:
                partitions.reverse()
            whole = torch.cat(partitions)[: self.numel]
            size = self.padded // self.dp.size
            begin = self.dp.rank * size
            if "states_loaded_without_alignment" in self.faults:
                begin = self.dp.rank * -(-self.numel // self.dp.size)
            own = whole[begin : begin + size]
            state[key] = torch.cat([own, own.new_zeros(size - len(own))])


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model]:
    """Train; return this rank's model."""
    dp = world()
    with default_dtype(dtype):
        model = Model(faults)
    fill(model, {}, ONE)
    optimizer = PartitionedAdamW(model, dp, faults)
    for step in range(1, steps + 1):
        if step == 2:
            optimizer.reload()
        tokens, labels = (part.chunk(2) for part in batch(step, rows=8))
        count = sum((part >= 0).sum() for part in labels)
        first: list[Tensor] = []
        model.zero_grad()
        for some_tokens, some_labels in zip(tokens, labels, strict=True):
            logits = model(dp.part(some_tokens, 0)).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, dp.part(some_labels, 0).flatten(), reduction="sum") / count
            (loss * dp.size).backward()
            first = first or [it.grad.clone() for it in model.parameters() if it.grad is not None]
        if "later_microbatches_not_reduced" in faults:
            for parameter, gradient in zip(model.parameters(), first, strict=True):
                parameter.grad = gradient
        optimizer.finish_gather()
        optimizer.reduce_gradients()
        optimizer.step()
    optimizer.finish_gather()
    return (model,)


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    return whole_parameters(run(faults, dtype, steps)[0], {}, ONE)
