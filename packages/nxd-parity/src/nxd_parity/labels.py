"""Labels of a loss: programs give them to functions, where no hook sees them, but gradients of outputs show them."""

import torch
from torch import Tensor

FEWEST_CLASSES = 8  # most of which are not the labels
ROUNDING = 0.1  # of the largest difference


def are_others(expected: Tensor, found: Tensor) -> bool:
    """Whether gradients of scores differ as they do if labels of a cross entropy are others.

    Its gradient is the probability of each class, less one for the label: only two classes of a row then differ, by
    opposite values.

    Args:
        expected: gradients of a reference, `[..., classes]`.
        found: those of a candidate, of the same shape; they may have another factor, as parts of a mean have.
    """
    if expected.dim() < 2 or expected.shape != found.shape or expected.shape[-1] < FEWEST_CLASSES:
        return False
    wanted, got = (it.double().flatten(0, -2) for it in (expected, found))
    apart = got - wanted * (got / wanted).nanmedian()
    largest = apart.abs().max()
    if not largest.isfinite() or not largest:
        return False
    apart = torch.where(apart.abs() > ROUNDING * largest, apart, 0.0)
    rows = apart[apart.any(-1)]
    is_pair = (rows != 0).sum(-1) == 2
    return bool(is_pair.all()) and bool((rows.sum(-1).abs() <= ROUNDING * largest).all())
