"""Gradients of parameters in a sequence-parallel region, where each rank has seen only its part of the sequence."""

from collections.abc import Iterable

import torch
from nxd_state import Group, active_group, all_reduce_
from torch import Tensor


@torch.no_grad()
def reduce_sequence_parallel_gradients(parameters: Iterable[Tensor], group: Group | None = None) -> None:
    """Sum the gradients of parameters marked `sequence_parallel_enabled` over the tensor-parallel ranks, in place.

    One message per dtype. A marked parameter without a gradient counts as zero. Call it once per step, before or after
    the average over data-parallel replicas, but not while that is under way: so after `GradientReducer.finish`.

    Args:
        parameters: all parameters of the model; the others are left alone.
        group: the tensor-parallel group if None.
    """
    group = group if group is not None else active_group("tp")
    if group.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad and getattr(parameter, "sequence_parallel_enabled", False):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        summed = all_reduce_(torch.cat([grad.reshape(-1) for grad in grads]), group)
        for grad, part in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
