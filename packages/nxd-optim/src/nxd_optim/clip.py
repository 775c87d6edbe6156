"""Computes the norm of a model's gradients, counting every element of the logical model once, and clips by it.

Shards are counted on each rank. Elements that several ranks hold are counted once: replicated parameters, rows with
several copies, and tied weights kept on two stages. Where the rows that count differ between ranks (padding, copies of
rows), they are weighted by a tensor, because on XLA all ranks must record the same graph.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from nxd_state import (
    ShardSpec,
    all_gather,
    all_reduce_,
    get_device,
    get_shard_spec,
    is_padded_on_some_rank,
    records_graphs,
    widest_float,
)
from torch import Tensor

from nxd_optim.placement import Placement, dense_placement, expert_placement, is_expert

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_ and Megatron-LM


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor] | Tensor, norm_type: float | str = 2.0) -> Tensor:
    """Return the p-norm of the gradients of the whole model, the same on every rank.

    Every rank that holds a part of the model must call this, even without any gradient. A parameter marked `shared` is
    the second copy of a tied weight and is skipped; its first copy counts.

    Args:
        parameters: this rank's parameters, as a tensor or any iterable, including generators. Duplicates count once,
            and parameters without a gradient are skipped.
        norm_type: p > 0, or inf (also as "inf").

    Returns:
        A 0-d tensor in the device's widest float. Half-precision gradients are accumulated in float32.

    Raises:
        ValueError: `norm_type` is not positive, or a parameter is sharded along another axis than "tp".
    """
    power = _check_norm_type(norm_type)
    parameters = _as_list(parameters)
    device = next((it.grad.device for it in parameters if it.grad is not None), get_device())
    experts = expert_placement()
    totals = [
        _norm_of_kind(
            [it for it in parameters if experts is None or not is_expert(it)], dense_placement(), power, device
        )
    ]
    if experts is not None:
        totals.append(_norm_of_kind([it for it in parameters if is_expert(it)], experts, power, device))
    together = torch.stack(totals)
    return together.max() if math.isinf(power) else together.sum().pow(1.0 / power)


def _norm_of_kind(parameters: list[Tensor], placement: Placement, power: float, device: torch.device) -> Tensor:
    """Return the norm to its power, or the largest magnitude, of parameters with the same placement; 0-d."""
    by_copies = _gradients_by_copies(parameters, placement, power)
    total = norm_accumulator(device)
    if math.isinf(power):
        for grads in by_copies.values():
            total = torch.maximum(total, tensor_norms(grads, power, total).max())
        return all_gather(total, placement.parts).max()  # not a reduction by max, in which gloo and nccl may lose a NaN
    for copies, grads in by_copies.items():
        total += tensor_norms(grads, power, total).pow(power).sum() / copies
    return all_reduce_(total, placement.parts).squeeze(0)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale the gradients in place so that the norm of the whole model's gradients is at most `max_norm`.

    The scale is `max_norm / (norm + 1e-6)` where that is below 1.

    Args:
        parameters: as for `grad_norm`.
        max_norm: maximum norm.
        norm_type: as for `grad_norm`.

    Returns:
        The norm before clipping, as `grad_norm` returns it.

    Raises:
        ValueError: `max_norm` is negative or not a number, or as for `grad_norm`.
    """
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more")
    parameters = _as_list(parameters)
    norm = grad_norm(parameters, norm_type)
    # No branch on the value: reading it would stall the device.
    scale = torch.clamp(float(max_norm) / (norm + CLIP_EPSILON), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return norm


def _as_list(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(dict.fromkeys(parameters))


def _gradients_by_copies(parameters: list[Tensor], placement: Placement, power: float) -> dict[int, list[Tensor]]:
    """Return gradients, or boxes of them, by the number of ranks that hold the same elements.

    On XLA the boxes cannot be part of the graph, because they differ between ranks: see `norm_weights`.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None or parameter.numel() == 0 or getattr(parameter, "shared", False):
            continue
        spec = get_shard_spec(parameter)
        if spec is None:
            by_copies.setdefault(placement.copies, []).append(parameter.grad)
            continue
        placement.check(spec)
        if records_graphs(parameter) and differs_between_ranks(parameter):
            by_copies.setdefault(1, []).append(parameter.grad * row_weights(parameter, power))
            continue
        for piece in spec.pieces:
            whole = piece.local.shape == spec.local_shape
            grad = parameter.grad if whole else parameter.grad[piece.local.slices]
            by_copies.setdefault(piece.copies, []).append(grad)
    return by_copies


def norm_accumulator(device: torch.device) -> Tensor:
    """Return a zero, `[1]`, to accumulate powers of norms in."""
    # Not in the gradients' dtype: other ranks may have another one, or none, and powers of float32 norms overflow.
    return torch.zeros(1, dtype=widest_float(device), device=device)


def tensor_norms(tensors: Sequence[Tensor], power: float, like: Tensor) -> Tensor:
    """Return the norm of each tensor, `[len(tensors)]`, with the device and dtype of `like`."""
    norms = []
    for tensor in tensors:
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        norms.append(torch.linalg.vector_norm(tensor, power, dtype=dtype).to(like))
    return torch.stack(norms)


def _check_norm_type(norm_type: float | str) -> float:
    try:
        power = float(norm_type)
    except ValueError:
        power = math.nan
    if not power > 0:
        raise ValueError(f"norm_type={norm_type!r} must be a positive number or 'inf'")
    return power


def differs_between_ranks(parameter: Tensor) -> bool:
    """Whether the counted elements of this parameter may differ between ranks; the same on every rank."""
    spec = get_shard_spec(parameter)
    if spec is None or not hasattr(parameter, "partition_dim"):
        return False
    return is_padded_on_some_rank(parameter) or len(spec.pieces) > 1 or any(piece.copies > 1 for piece in spec.pieces)


def row_weights(parameter: Tensor, power: float) -> Tensor:
    """Return factors for a gradient before its norm, so that a sum over all ranks counts the model once.

    Args:
        parameter: a parameter that `differs_between_ranks`.
        power: the power of the norm.

    Returns:
        A tensor of length 1 in all dims except the split one: the number of copies to the power of -1/`power`; 0 at
        padding.
    """
    spec = get_shard_spec(parameter)
    assert spec is not None  # such a parameter has one
    partition_dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    return _row_weights(spec, partition_dim, power, parameter.device)


@functools.cache
@torch.inference_mode(False)
def _row_weights(spec: ShardSpec, dim: int, power: float, device: torch.device) -> Tensor:
    shape = [1] * len(spec.local_shape)
    shape[dim] = spec.local_shape[dim]
    weights = torch.zeros(shape)
    for piece in spec.pieces:
        weights.movedim(dim, 0)[piece.local.slices[dim]] = piece.copies ** (-1 / power)
    return weights.to(device)
