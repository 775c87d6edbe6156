"""One training step, timed by phase: zeroed gradients, forward, backward, AdamW."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from training_step.plain_llama import PlainLlama
from training_step.sizes import Size
from training_step.variants import Variant


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by phase."""

    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.optimizer


class Trainee:
    """A model in training on one batch, with the same initial weights for every variant and on every rank."""

    def __init__(self, variant: Variant, size: Size) -> None:
        torch.manual_seed(0)
        self._model = variant.build(PlainLlama(size.config), size)
        self._context = variant.context
        # Norms apart, as in training; and DTensor cannot update plain tensors and its own in one fused call.
        parameters = list(self._model.parameters())
        groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
        self._optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, fused=True)
        self._input_ids, self._labels = size.tokens()
        self.losses: list[Tensor] = []

    def step(self) -> StepTime:
        """One step; keeps its loss."""
        moments = [time.perf_counter()]
        with self._context():
            loss = self._model(self._input_ids, self._labels)
            moments.append(time.perf_counter())
            loss.backward()
        moments.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        moments.append(time.perf_counter())
        self.losses.append(loss.detach())
        return StepTime(*(end - start for start, end in zip(moments, moments[1:], strict=False)))
