"""The norm of a model's gradients, counting every element of the logical model once, and clipping by it.

Shards are counted on each rank, what several ranks hold is counted once: parameters that are whole everywhere,
rows with several copies, and tied weights kept on two stages.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from nxd_state import Group, active_group, all_reduce_, get_shard_spec
from torch import Tensor

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ and Megatron-LM have it


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor] | Tensor, norm_type: float | str = 2.0) -> Tensor:
    """The p-norm of the gradients of the whole model, the same on every rank.

    Args:
        parameters: this rank's parameters; those without gradient are skipped. Every rank of a replica must call.
        norm_type: p > 0, or inf (also as "inf").

    Returns:
        0-d tensor, float32, or float64 where the gradients are.

    Raises:
        ValueError: `norm_type` is not positive.
    """
    power = _check_norm_type(norm_type)
    counted = _counted_gradients(parameters)
    group = active_group("pp", "tp")
    grads = [grad for tensors in counted.values() for grad in tensors]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    total = torch.zeros((), dtype=dtype, device=grads[0].device if grads else None)
    if math.isinf(power):
        for norms in (_norms(tensors, power, dtype) for tensors in counted.values()):
            total = torch.maximum(total, norms.max())
        return _over_model(total, group, "max")
    for copies, tensors in counted.items():
        total += _norms(tensors, power, dtype).pow(power).sum() / copies
    return _over_model(total, group, "sum").pow(1.0 / power)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale the gradients in place so that the norm of the whole model's is at most `max_norm`.

    The scale is `max_norm / (norm + 1e-6)` where that is below 1.

    Args:
        parameters: this rank's parameters, as a tensor or any iterable, also a generator.
        max_norm: largest norm allowed.
        norm_type: as for `grad_norm`.

    Returns:
        The norm before clipping, 0-d, the same on every rank.

    Raises:
        ValueError: `max_norm` is negative or not a number, or `norm_type` is not positive.
    """
    if math.isnan(float(max_norm)) or float(max_norm) < 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more")
    chosen = [parameters] if isinstance(parameters, Tensor) else list(dict.fromkeys(parameters))
    norm = grad_norm(chosen, norm_type)
    # No branch on the value: reading it would stall the device.
    scale = torch.clamp(float(max_norm) / (norm + CLIP_EPSILON), max=1.0)
    for parameter in chosen:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return norm


def _counted_gradients(parameters: Iterable[Tensor] | Tensor) -> dict[int, list[Tensor]]:
    """Gradients (or boxes of them) by the number of tensor-parallel ranks that hold the same elements."""
    chosen = [parameters] if isinstance(parameters, Tensor) else dict.fromkeys(parameters)
    tensor_parallel_size = active_group("tp").size
    counted: dict[int, list[Tensor]] = {}
    for parameter in chosen:
        if parameter.grad is None or getattr(parameter, "shared", False):
            continue
        spec = get_shard_spec(parameter)
        if spec is None:
            counted.setdefault(tensor_parallel_size, []).append(parameter.grad)
            continue
        for piece in spec.pieces:
            whole = piece.local.shape == spec.local_shape
            grad = parameter.grad if whole else parameter.grad[piece.local.slices]
            counted.setdefault(piece.copies, []).append(grad)
    return counted


def _norms(tensors: list[Tensor], power: float, dtype: torch.dtype) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(tensor, power, dtype=dtype) for tensor in tensors])


def _over_model(value: Tensor, group: Group, op: Literal["sum", "max"]) -> Tensor:
    return all_reduce_(value, group, op=op)


def _check_norm_type(norm_type: float | str) -> float:
    try:
        power = float(norm_type)
    except ValueError:
        power = math.nan
    if not power > 0:
        raise ValueError(f"norm_type={norm_type!r} must be a positive number or 'inf'")
    return power
