"""One training step, timed by phase: forward, backward, AdamW."""

import time
from dataclasses import dataclass

import torch
from nxd_optim import reduce_sequence_parallel_gradients
from torch.distributed.tensor import DTensor

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
    """A model in training on one batch, with the same initial weights for every variant and on every rank.

    Attributes:
        losses: of the steps so far.
    """

    def __init__(self, variant: Variant, size: Size) -> None:
        torch.manual_seed(0)
        self._model = variant.build(PlainLlama(size.config), size)
        self._context = variant.context
        self._input_ids, self._labels = size.tokens()
        self._parameters = list(self._model.parameters())
        # Norms apart, as in training; and DTensor cannot update plain tensors and its own in one fused call.
        groups = [[p for p in self._parameters if p.dim() > 1], [p for p in self._parameters if p.dim() == 1]]
        self._optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, fused=True)
        self.losses: list[float] = []

    def step(self) -> StepTime:
        """One step, timed; keeps its loss."""
        start = time.perf_counter()
        with self._context():
            loss = self._model(self._input_ids, self._labels)
            after_forward = time.perf_counter()
            loss.backward()
        reduce_sequence_parallel_gradients(self._parameters)  # does something only for ours, sequence parallel
        after_backward = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        end = time.perf_counter()
        self.losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
        return StepTime(after_forward - start, after_backward - after_forward, end - after_backward)
