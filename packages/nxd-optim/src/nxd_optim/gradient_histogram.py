"""Histograms of the gradients of the whole model's logical parameters by magnitude, to find underflow and outliers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from nxd_state import Group, active_group, all_reduce_, widest_float
from nxd_state.parameter_marks import is_expert
from torch import Tensor
from torch.optim import Optimizer

from nxd_optim.clip import GradientRange, counted_parts
from nxd_optim.placement import Placement, expert_placement, placement_of
from nxd_optim.zero import NeuronZero1Optimizer

SMALLEST_EXPONENT, LARGEST_EXPONENT = -60, 20
_MAGNITUDES = LARGEST_EXPONENT - SMALLEST_EXPONENT + 1


@dataclass(frozen=True)
class GradientHistogram:
    """Number of elements of a parameter's gradient by magnitude.

    Attributes:
        counts: `[81]` int64; element i counts `2**e <= |g| < 2**(e+1)` for `e = SMALLEST_EXPONENT + i`. Smaller and
            larger elements count in the first and the last.
        zeros: number of zero elements.
        nonfinite: number of infinite or NaN elements.
    """

    counts: Tensor
    zeros: int
    nonfinite: int

    @property
    def elements(self) -> int:
        """Number of elements of the logical parameter."""
        return int(self.counts.sum()) + self.zeros + self.nonfinite


class GradientHistograms:
    """Reports histograms of an optimizer's complete gradients every `every` steps; with ZeRO before clipping.

    Every rank must take part: tensor-parallel ranks and, with ZeRO, replicas get the same histograms of their
    stage. A reported step costs one pass over the gradients and a small message; other steps cost nothing.

    Args:
        optimizer: any torch optimizer whose gradients are complete when its `step` is called, or a
            `NeuronZero1Optimizer`, which completes them itself. It calls this object at each step.
        named_parameters: the result of `model.named_parameters()`. Parameters without a gradient are not reported (with
            ZeRO they count as zeros).
        report: called with the number of the step, from 1, and the histogram of each parameter by its name.
        every: number of steps between reports.
        step: returns the number of the step that is being taken; None to count steps here.

    Raises:
        ValueError: `every` is below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        report: Callable[[int, dict[str, GradientHistogram]], None],
        *,
        every: int = 1,
        step: Callable[[], int] | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be 1 or more")
        self.named_parameters = list(named_parameters)
        self.report, self.every = report, every
        self.steps = 0
        self._step = step
        if isinstance(optimizer, NeuronZero1Optimizer):
            self._sharded, self._optimizer = (
                optimizer.placements,
                ref(optimizer),
            )  # a cycle would never be freed by itself
            optimizer.register_gradient_hook(self._on_parts)
        else:
            optimizer.register_step_pre_hook(self._on_step)

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_due():
            self.report(self.steps, gradient_histograms(self.named_parameters))

    @torch.no_grad()
    def _on_parts(self, gradients: Sequence[GradientRange]) -> None:
        if not self._is_due():
            return
        optimizer = self._optimizer()
        assert optimizer is not None  # it calls this
        self.report(
            self.steps, _histograms(self.named_parameters, gradients, self._sharded, scale=optimizer.loss_scale)
        )

    def _is_due(self) -> bool:
        self.steps = self.steps + 1 if self._step is None else self._step()
        return self.steps % self.every == 0


@torch.no_grad()
def gradient_histograms(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, GradientHistogram]:
    """Return the histogram of each parameter's gradient over the tensor-parallel ranks; logical elements count once.

    Args:
        named_parameters: parameters by name, with the same names, order and gradients on every rank of the
            tensor-parallel group.
    """
    found = [(name, parameter) for name, parameter in named_parameters if parameter.grad is not None]
    parameters = dict.fromkeys(parameter for _, parameter in found)
    gradients = [GradientRange(p, 0, p.numel(), p.grad.detach().to_dense()) for p in parameters if p.grad is not None]
    return _histograms(found, gradients, sharded=None)


def _histograms(
    named_parameters: Sequence[tuple[str, Tensor]],
    gradients: Iterable[GradientRange],
    sharded: Sequence[Placement] | None,
    *,
    scale: float = 1.0,
) -> dict[str, GradientHistogram]:
    if not named_parameters:
        return {}
    parameters = list(dict.fromkeys(parameter for _, parameter in named_parameters))
    # Per parameter: counts by magnitude, zeros, non-finite elements; `[parameters, 83]`. In float64 where supported,
    # because copies count as fractions that must add up to whole numbers.
    device = parameters[0].device
    tallies = torch.zeros(len(parameters), _MAGNITUDES + 2, dtype=widest_float(device), device=device)
    rows = dict(zip(parameters, tallies, strict=True))
    for it in gradients:
        if it.parameter in rows:
            for copies, part in counted_parts(it, placement_of(it.parameter)):
                rows[it.parameter] += (_count(part / scale) / copies).to(tallies)
    totals = dict(zip(parameters, _of_all_ranks(tallies, parameters, sharded).round().long().cpu(), strict=True))
    return {
        name: GradientHistogram(totals[it][:_MAGNITUDES], int(totals[it][-2]), int(totals[it][-1]))
        for name, it in named_parameters
    }


def _of_all_ranks(tallies: Tensor, parameters: Sequence[Tensor], sharded: Sequence[Placement] | None) -> Tensor:
    """Sum over the ranks that hold other parts of the same logical parameters.

    Args:
        tallies: `[parameters, 83]`.
        parameters: the parameters, in the same order.
        sharded: the placements of dense layers and of experts if each of their replicas has a part of the gradients;
            None if all have all.
    """
    shared, of_experts = ((), ()) if sharded is None else ((sharded[0].replicas,), (sharded[-1].replicas,))
    if expert_placement() is None:
        return _sum_over(tallies, (*shared, active_group("tp")))
    rows = torch.tensor([is_expert(it) for it in parameters], device=tallies.device).unsqueeze(1)
    dense = _sum_over(tallies.masked_fill(rows, 0), (*shared, active_group("tp")))
    return dense + _sum_over(tallies.masked_fill(~rows, 0), (*of_experts, active_group("ep"), active_group("etp")))


def _sum_over(tallies: Tensor, groups: Sequence[Group]) -> Tensor:
    for group in groups:
        tallies = all_reduce_(tallies, group)
    return tallies


def _count(grad: Tensor) -> Tensor:
    flat = grad.reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    _, exponent = torch.frexp(flat)  # |g| = m * 2**exponent with 0.5 <= m < 1
    index = (exponent.long() - 1 - SMALLEST_EXPONENT).clamp(0, _MAGNITUDES - 1)
    index = torch.where(flat == 0, _MAGNITUDES, index)
    index = torch.where(flat.isfinite(), index, _MAGNITUDES + 1)
    return torch.bincount(index, minlength=_MAGNITUDES + 2).to(widest_float(grad.device))
