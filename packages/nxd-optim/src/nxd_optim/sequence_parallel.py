"""Sums gradients of parameters for which each tensor-parallel rank has seen only part of the sequence.

`nxd_state.parameter_marks.is_sequence_parallel` says which parameters these are.
"""

from collections.abc import Iterable

import torch
from nxd_state import Group, active_group, all_reduce_
from nxd_state.parameter_marks import is_sequence_parallel
from torch import Tensor


@torch.no_grad()
def reduce_sequence_parallel_gradients(parameters: Iterable[Tensor], group: Group | None = None) -> None:
    """Sum the gradients of parameters marked `sequence_parallel_enabled` over the tensor-parallel ranks, in place.

    Sends one message per dtype. A marked parameter without a gradient counts as zero. Call it once per step, before or
    after averaging over data-parallel replicas but not during it, for example after `GradientReducer.finish`.

    Args:
        parameters: all parameters of the model; unmarked ones are ignored.
        group: the process group to sum over; the tensor-parallel group if None.
    """
    group = group if group is not None else active_group("tp")
    if group.size == 1:
        return
    marked = [p for p in dict.fromkeys(parameters) if p.requires_grad and is_sequence_parallel(p)]
    for parameter in marked:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_sequence_parallel(((parameter, parameter.grad) for parameter in marked if parameter.grad is not None), group)


@torch.no_grad()
def sum_sequence_parallel(gradients: Iterable[tuple[Tensor, Tensor]], group: Group) -> None:
    """Sum the gradients of marked parameters over the ranks of a group, in place, with one message per dtype.

    Args:
        gradients: parameters, marked or not, each with its gradient or the same part of it on every rank.
        group: the process group to sum over.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter, gradient in gradients:
        if is_sequence_parallel(parameter):
            alike.setdefault((gradient.dtype, parameter.device), []).append(gradient)
    for (_, device), grads in alike.items():  # gradients may be in host memory, which not every group can send
        summed = all_reduce_(torch.cat([grad.reshape(-1) for grad in grads]).to(device), group)
        for grad, part in zip(grads, summed.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
