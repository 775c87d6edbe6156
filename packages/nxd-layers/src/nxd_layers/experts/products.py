"""Products of tokens with the weights of their experts."""

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_product(tokens: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Each token times the weight of its expert; no work for experts without tokens.

    Args:
        tokens: `[rows, in]`, those of an expert next to each other, in the order of the experts.
        weights: `[experts, in, out]`.
        counts: tokens of each expert.

    Returns:
        `[rows, out]`.
    """
    parts = zip(tokens.split(list(counts)), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts if len(part)])
