"""Joins a model's inputs for single images to those for all, so that only one decoded image is in memory at a time.

Which dimension grows with the number of images, and whether smaller images are padded with zeros, differs by processor;
`find_dims` tries it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

Inputs = Mapping[str, Tensor]


def find_dims(apart: Sequence[Inputs], together: Inputs) -> dict[str, int] | None:
    """Return the dimension by which each input of single images is joined to that of all; None if one cannot be.

    Args:
        apart: the inputs for each of some images of different sizes.
        together: the inputs for all of them.
    """
    dims = {}
    for name, expected in together.items():
        values = [inputs[name] for inputs in apart if name in inputs and inputs[name].dim() == expected.dim()]
        fitting = (it for it in range(expected.dim()) if _equal(_joined(values, it), expected))
        found = next(fitting, None) if len(values) == len(apart) else None
        if found is None:
            return None
        dims[name] = found
    return dims


def join(apart: Sequence[Inputs], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the inputs for all images, from those for each."""
    return {name: _joined([inputs[name] for inputs in apart], dim) for name, dim in dims.items()}


def _joined(values: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors by a dimension; the others are padded with zeros at the end to the largest."""
    largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    padded = []
    for value in values:
        missing = [0 if it == dim else largest[it] - size for it, size in enumerate(value.shape)]
        padded.append(pad(value, [bound for it in reversed(missing) for bound in (0, it)]) if any(missing) else value)
    return torch.cat(padded, dim)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
