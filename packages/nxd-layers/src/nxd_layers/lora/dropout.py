"""Dropout whose mask is that of one process, however its input is split."""

import torch
from nxd_state import active_group
from torch import Tensor

from nxd_layers.mappings import own_part


def branch_dropout(input_: Tensor, probability: float, *, training: bool, split_dim: int | None = None) -> Tensor:
    """Drop elements of a branch's input.

    Every tensor-parallel rank draws the mask of the whole input from the stream that these ranks share and takes its
    part. So ranks that hold the same elements drop the same ones, and the masks do not depend on the layout.

    Args:
        input_: any shape.
        probability: of an element to be dropped, below 1.
        training: False keeps everything.
        split_dim: the dim along which the input is split over the tensor-parallel ranks, if it is.
    """
    if probability == 0.0 or not training:
        return input_
    group = active_group("tp")
    shape = list(input_.shape)
    if split_dim is not None:
        shape[split_dim] *= group.size
    kept = torch.empty(shape, dtype=torch.bool, device=input_.device).bernoulli_(1.0 - probability)
    if split_dim is not None and group.size > 1:
        kept = own_part(kept, group, split_dim)
    return input_ * kept * (1.0 / (1.0 - probability))
