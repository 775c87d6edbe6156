"""Two pipeline stages by hand-written sends and receives, with tied embeddings, on 2 ranks, or on 4 as DP 2 by PP 2.

All microbatches go forward, then all go backward. The last stage has its own copy of the embedding for the logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from silent_bugs.programs.axis import ONE, Axis, axis_of, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import VOCABULARY, batch, default_dtype, fill

RANKS = 2
HIDDEN = 10
LAYERS = 4
MICROBATCHES = 4
ROWS = 8


class Stage(nn.Module):
    """The layers of a stage, which keep the names of the whole model; the first and last stage have the embedding."""

    def __init__(self, pp: Axis) -> None:
        super().__init__()
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        own = torch.arange(LAYERS).chunk(pp.size)[pp.rank].tolist()
        self.layers = nn.ModuleDict({str(index): nn.Linear(HIDDEN, HIDDEN) for index in own})
        self.norm = nn.RMSNorm(HIDDEN) if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the stage's output: hidden states, or logits, of tokens or hidden states."""
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x if self.norm is None else nn.functional.linear(self.norm(x), self.embedding.weight)


class Pipeline:
    """Runs the microbatches of a step through the stages."""

    def __init__(self, stage: Stage, pp: Axis, dp: Axis, faults: Faults) -> None:
        self.stage, self.pp, self.dp, self.faults = stage, pp, dp, faults
        ranks = [dist.get_process_group_ranks(pp.group)[i] for i in range(pp.size)] if pp.group is not None else [0]
        self.before = None if stage.is_first else ranks[pp.rank - 1]
        self.after = None if stage.is_last else ranks[pp.rank + 1]

    def step(self, tokens: Tensor, labels: Tensor, dtype: torch.dtype) -> None:
        """Accumulate the gradients of all microbatches of a whole batch; this replica takes its rows of each."""
        count = (labels >= 0).sum()
        rows = [
            (self.dp.part(some_tokens, 0), self.dp.part(some_labels, 0))
            for some_tokens, some_labels in zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
        ]
        calls = [self._forward(index, rows, count, dtype) for index in range(MICROBATCHES)]
        for index, (x, y) in enumerate(calls):
            if "gradients_cleared_between_microbatches" in self.faults:
                self.stage.zero_grad()
            self._backward(x, y)
            if "gradients_scaled_at_each_accumulation" in self.faults and index % 2 == 1:
                for parameter in self.stage.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= 2

    def _forward(
        self, index: int, rows: list[tuple[Tensor, Tensor]], count: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        tokens, labels = rows[index]
        if "every_microbatch_has_the_inputs_of_the_first" in self.faults:
            tokens = rows[0][0]
        x = tokens
        if self.before is not None:
            x = torch.empty(*tokens.shape, HIDDEN, dtype=dtype)
            dist.recv(x, self.before)
            x.requires_grad_()
        y = self.stage(x)
        if self.after is not None:
            dist.send(y.detach(), self.after)
            return x, y
        loss = nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="sum")
        if "sum_of_losses_not_divided" not in self.faults:
            loss = loss / count * self.dp.size
        if "loss_divided_by_microbatches_again" in self.faults:
            loss = loss / MICROBATCHES
        if "gradients_scaled_at_each_accumulation" in self.faults:
            loss = loss * 2
        return x, loss

    def _backward(self, x: Tensor, y: Tensor) -> None:
        gradient = None
        if self.after is not None:
            gradient = torch.empty_like(y)
            dist.recv(gradient, self.after)
        torch.autograd.backward(y, gradient)
        if self.before is not None:
            assert x.grad is not None
            dist.send(x.grad, self.before)


def sync_gradients(stage: Stage, pp: Axis, dp: Axis, faults: Faults) -> None:
    """Average the gradients over the replicas, and sum those of the two copies of the embedding."""
    for name, parameter in stage.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        is_averaged = True
        if "replicas_of_the_last_stage_not_averaged" in faults:
            is_averaged = pp.rank == 0
        if "embedding_summed_before_it_is_averaged" in faults and name == "embedding.weight":
            is_averaged = pp.rank != dp.rank
        if is_averaged or dp.size == 1:
            gradient.copy_(dp.sum(gradient) / dp.size)
        else:
            dp.sum(gradient)
        if name == "embedding.weight" and "tied_embedding_gradients_not_summed" not in faults:
            gradient.copy_(pp.sum(gradient))


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Stage, Axis]:
    """Train; return this rank's stage and the axis of the stages."""
    pp, dp = world(), ONE
    if pp.size == 4:
        pp, dp = axis_of([[0, 1], [2, 3]]), axis_of([[0, 2], [1, 3]])
    with default_dtype(dtype):
        stage = Stage(pp)
    fill(stage, {}, ONE)
    pipeline = Pipeline(stage, pp, dp, faults)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        pipeline.step(*batch(step, rows=ROWS), dtype)
        sync_gradients(stage, pp, dp, faults)
        optimizer.step()
    return stage, pp


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the parameters of this rank's stage."""
    return {name: parameter.detach().clone() for name, parameter in run(faults, dtype, steps)[0].named_parameters()}
