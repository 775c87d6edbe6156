"""Histograms of the gradients of the whole model's logical parameters by magnitude, to find underflow and outliers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from nxd_state import Group, active_group, all_reduce_, get_device, widest_float
from torch import Tensor
from torch.optim import Optimizer

from nxd_optim.clip import GradientRange, counted_parts
from nxd_optim.placement import expert_placement, is_expert, placement_of
from nxd_optim.zero1 import NeuronZero1Optimizer

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
    """Reports histograms of an optimizer's complete gradients every `every` steps; with ZeRO-1 before clipping.

    Every rank must take part: tensor-parallel ranks and, with ZeRO-1, replicas get the same histograms of their
    stage. A reported step costs one pass over the gradients and a small message; other steps cost nothing.

    Args:
        optimizer: any torch optimizer whose gradients are complete when its `step` is called, or a
            `NeuronZero1Optimizer`, which completes them itself. It calls this object at each step.
        named_parameters: the result of `model.named_parameters()`. Parameters without a gradient are not reported (with
            ZeRO-1 they count as zeros).
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
            self._group, self._optimizer = optimizer.group, ref(optimizer)  # a cycle would never be freed by itself
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
        if not self.named_parameters:  # a stage without parameters to report
            self.report(self.steps, {})
            return
        rows = {parameter: row for row, (_, parameter) in enumerate(self.named_parameters)}
        optimizer = self._optimizer()
        assert optimizer is not None  # it calls this
        tallies = torch.zeros(len(rows), _MAGNITUDES + 2, dtype=widest_float(get_device()), device=get_device())
        for it in gradients:
            if it.parameter in rows:
                tallies[rows[it.parameter]] += _tally(replace(it, gradient=it.gradient / optimizer.loss_scale))
        tallies = _of_all_ranks(tallies, [parameter for _, parameter in self.named_parameters], self._group)
        self.report(self.steps, _histograms([name for name, _ in self.named_parameters], tallies))

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
    if not found:
        return {}
    # float64 where supported, because copies count as fractions that must add up to whole numbers.
    gradients = [GradientRange(p, 0, p.numel(), p.grad.detach().to_dense()) for _, p in found if p.grad is not None]
    tallies = torch.stack([_tally(gradient) for gradient in gradients])
    tallies = _of_all_ranks(tallies, [parameter for _, parameter in found], replicas=None)
    return _histograms([name for name, _ in found], tallies)


def _of_all_ranks(tallies: Tensor, parameters: Sequence[Tensor], replicas: Group | None) -> Tensor:
    """Sum over the ranks that hold other parts of the same logical parameters.

    Args:
        tallies: `[parameters, 83]`.
        parameters: the parameters, in the same order.
        replicas: replicas of dense layers if each has its part of the gradients; None if all have all.
    """
    experts = expert_placement()
    shared = () if replicas is None else (replicas,)
    if experts is None:
        return _sum_over(tallies, (*shared, active_group("tp")))
    rows = torch.tensor([is_expert(it) for it in parameters], device=tallies.device).unsqueeze(1)
    of_experts = () if replicas is None else (experts.replicas,)
    dense = _sum_over(tallies.masked_fill(rows, 0), (*shared, active_group("tp")))
    return dense + _sum_over(tallies.masked_fill(~rows, 0), (*of_experts, active_group("ep"), active_group("etp")))


def _sum_over(tallies: Tensor, groups: Sequence[Group]) -> Tensor:
    for group in groups:
        tallies = all_reduce_(tallies, group)
    return tallies


def _histograms(names: Sequence[str], tallies: Tensor) -> dict[str, GradientHistogram]:
    totals = tallies.round().long().cpu()
    return {
        name: GradientHistogram(total[:_MAGNITUDES], int(total[-2]), int(total[-1]))
        for name, total in zip(names, totals, strict=True)
    }


def _tally(it: GradientRange) -> Tensor:
    """Return counts by magnitude, then zeros, then non-finite elements, `[83]` floats: this rank's share."""
    tally = torch.zeros(_MAGNITUDES + 2, dtype=widest_float(it.gradient.device), device=it.gradient.device)
    for copies, part in counted_parts(it, placement_of(it.parameter)):
        tally += _count(part) / copies
    return tally


def _count(grad: Tensor) -> Tensor:
    flat = grad.reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    _, exponent = torch.frexp(flat)  # |g| = m * 2**exponent with 0.5 <= m < 1
    index = (exponent.long() - 1 - SMALLEST_EXPONENT).clamp(0, _MAGNITUDES - 1)
    index = torch.where(flat == 0, _MAGNITUDES, index)
    index = torch.where(flat.isfinite(), index, _MAGNITUDES + 1)
    return torch.bincount(index, minlength=_MAGNITUDES + 2).to(widest_float(grad.device))
