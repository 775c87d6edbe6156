"""Norms, clipping and sums of gradients with the arguments of NeuronX Distributed."""

import math
from collections.abc import Iterable, Sequence

import torch
from nxd_optim import grad_norm
from nxd_state import Group, all_reduce, all_reduce_, get_group, group_among
from torch import Tensor


def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    norm_type: float | str = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Return the p-norm of the whole model's gradients, the same on every rank. Called by all ranks of the model.

    Args:
        parameters: this rank's parameters.
        norm_type: p > 0, or inf.
        zero1_optimizer: whether each replica has other elements of the gradients, so that the replicas' norms are
            combined.
        zero1_optimizer_groups: ranks of the groups to combine, instead of all replicas.
        force_spmd: accepted without effect; each element counts once in any case.

    Returns:
        A 0-d tensor.

    Raises:
        ValueError: groups without `zero1_optimizer`, or a `norm_type` that is not positive.
    """
    if zero1_optimizer_groups is not None and not zero1_optimizer:
        raise ValueError("zero1_optimizer_groups need zero1_optimizer=True; set it, or remove them")
    norm = grad_norm(parameters, norm_type)
    if not zero1_optimizer:
        return norm
    group = get_group("dp") if zero1_optimizer_groups is None else group_among(zero1_optimizer_groups)
    return _combined(norm, float(norm_type), group)


def _combined(norm: Tensor, power: float, group: Group) -> Tensor:
    if math.isinf(power):
        return all_reduce(norm, group, op="max")
    return all_reduce(norm.pow(power), group).pow(1 / power)


def clip_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float | str = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Scale the gradients so that the norm of the whole model's is at most `max_norm`; returns the norm before.

    Arguments and errors are those of `get_grad_norm`; a negative `max_norm` is a ValueError.
    """
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = get_grad_norm(listed, norm_type, zero1_optimizer, zero1_optimizer_groups, force_spmd)
    clip_grads_with_norm(listed, norm, max_norm)
    return norm


@torch.no_grad()
def clip_grads_with_norm(parameters: Iterable[Tensor], total_norm: Tensor, max_norm: float) -> Tensor:
    """Scale the gradients by `max_norm / (total_norm + 1e-6)` where that is below 1; returns `total_norm`."""
    scale = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return total_norm


@torch.no_grad()
def bucket_allreduce_gradients(grads_list: Iterable[Tensor], reduce_over_ep_group: bool = False) -> None:
    """Average gradients over the replicas, in place: one message for each dtype.

    With expert parallelism, over the replicas of each expert; those of weights outside of experts must then be given
    once more with `reduce_over_ep_group`, which only sums.

    Args:
        grads_list: gradients, the same and in the same order on every replica.
        reduce_over_ep_group: whether to sum over the expert-parallel ranks instead.
    """
    has_experts = get_group("ep").size > 1
    group = get_group("ep" if reduce_over_ep_group else "dp_exp" if has_experts else "dp")
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in grads_list:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce_(flat, group, op="sum" if reduce_over_ep_group or has_experts else "avg")
        if has_experts and not reduce_over_ep_group:
            flat /= get_group("dp").size
        for gradient, values in zip(gradients, flat.split([it.numel() for it in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
