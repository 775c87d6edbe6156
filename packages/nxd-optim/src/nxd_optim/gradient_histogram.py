"""Histograms of gradients by magnitude, of the whole model's logical parameters, to see underflow and outliers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import active_group, all_reduce_, get_shard_spec
from torch import Tensor

SMALLEST_EXPONENT, LARGEST_EXPONENT = -60, 20
_MAGNITUDES = LARGEST_EXPONENT - SMALLEST_EXPONENT + 1


@dataclass(frozen=True)
class GradientHistogram:
    """How many elements of a parameter's gradient have which magnitude.

    Attributes:
        counts: `[81]` int64; element i counts `2**e <= |g| < 2**(e+1)` for `e = SMALLEST_EXPONENT + i`. What is smaller
            or larger counts in the first or the last.
        zeros: elements that are zero.
        nonfinite: elements that are infinite or NaN.
    """

    counts: Tensor
    zeros: int
    nonfinite: int

    @property
    def elements(self) -> int:
        """All elements of the logical parameter."""
        return int(self.counts.sum()) + self.zeros + self.nonfinite


class GradientHistograms:
    """An optimizer hook that reports histograms every so many steps.

    Register it where gradients are complete, before they are used::

        optimizer.register_step_pre_hook(GradientHistograms(model.named_parameters(), report, every=100))

    Every tensor-parallel rank of a stage must take part and gets the same histograms. Costs one pass over the
    gradients and one message on the steps it reports, nothing on the others.

    Args:
        named_parameters: as `model.named_parameters()` gives them; those without a gradient are left out of a report.
        report: called with the number of the step, counted from 1, and the histogram of each parameter by its name.
        every: steps between reports.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        report: Callable[[int, dict[str, GradientHistogram]], None],
        *,
        every: int = 1,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be 1 or more")
        self.named_parameters = list(named_parameters)
        self.report, self.every = report, every
        self.steps = 0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """What torch calls before `optimizer.step`."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.report(self.steps, gradient_histograms(self.named_parameters))


@torch.no_grad()
def gradient_histograms(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, GradientHistogram]:
    """The histogram of each parameter's gradient over the tensor-parallel ranks, each logical element counted once.

    Args:
        named_parameters: the same names in the same order, and gradients of the same ones, on every rank of the
            tensor-parallel group.
    """
    group = active_group("tp")
    found = [(name, parameter) for name, parameter in named_parameters if parameter.grad is not None]
    if not found:
        return {}
    # float64, since copies count as fractions and all of them must add up to whole numbers.
    tallies = torch.stack([_tally(parameter, group.size) for _, parameter in found])
    totals = all_reduce_(tallies, group).round().long().cpu()
    return {
        name: GradientHistogram(total[:_MAGNITUDES], int(total[-2]), int(total[-1]))
        for (name, _), total in zip(found, totals, strict=True)
    }


def _tally(parameter: Tensor, tensor_parallel_size: int) -> Tensor:
    """Counts by magnitude, then zeros, then non-finite ones, `[83]` float64: this rank's share."""
    assert parameter.grad is not None
    spec = get_shard_spec(parameter)
    if spec is None:
        return _count(parameter.grad) / tensor_parallel_size
    tally = torch.zeros(_MAGNITUDES + 2, dtype=torch.float64, device=parameter.device)
    for piece in spec.pieces:
        tally += _count(parameter.grad[piece.local.slices]) / piece.copies
    return tally


def _count(grad: Tensor) -> Tensor:
    flat = grad.detach().to_dense().reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    _, exponent = torch.frexp(flat)  # |g| = m * 2**exponent with 0.5 <= m < 1
    index = (exponent.long() - 1 - SMALLEST_EXPONENT).clamp(0, _MAGNITUDES - 1)
    index = torch.where(flat == 0, _MAGNITUDES, index)
    index = torch.where(flat.isfinite(), index, _MAGNITUDES + 1)
    return torch.bincount(index, minlength=_MAGNITUDES + 2).double()
