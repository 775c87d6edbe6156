"""Computes the norm of a model's gradients, counting every element of the logical model once, and clips by it.

One engine serves whole gradients and ZeRO's ranges of them. Shards are counted on each rank. Elements that several
ranks hold are counted once: replicated parameters, rows with several copies, and tied weights kept on two stages. On
XLA, where all ranks must record the same graph, a tensor weights the elements if those that count differ between ranks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from nxd_state import (
    Group,
    all_gather,
    all_reduce_,
    get_device,
    get_shard_spec,
    is_lazy_device,
    is_padded_on_some_rank,
    widest_float,
)
from nxd_state.parameter_marks import get_partition, is_tied_copy
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nxd_optim.flat_shards import shards_of_range
from nxd_optim.placement import Placement, placement_among, placements_of

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
    gradients = [GradientRange(p, 0, p.numel(), p.grad) for p in _as_list(parameters) if p.grad is not None]
    device = gradients[0].gradient.device if gradients else get_device()
    return norm_of_gradients(gradients, device, power)


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
    max_norm = checked_max_norm(max_norm)
    parameters = _as_list(parameters)
    norm = grad_norm(parameters, norm_type)
    scale = clip_coefficient(norm, max_norm)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return norm


def checked_max_norm(max_norm: float, remedy: str = "") -> float:
    """Return the maximum norm as a float; raise a ValueError, ending with the remedy, if it is negative or NaN."""
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more{remedy}")
    return float(max_norm)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients of this norm, without reading the norm, which would stall the device.

    It is 1 if `max_norm` is inf, whatever the norm.
    """
    if math.isinf(max_norm):
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)


@dataclass(frozen=True, eq=False)
class GradientRange:
    """The gradient of elements `start:stop`, in C order, of a parameter.

    Attributes:
        parameter: the model's parameter.
        start: first element.
        stop: one past the last element.
        gradient: gradient of these elements, flat, or of the parameter's shape if these are all. On XLA a flat one may
            be padded with zeros.
    """

    parameter: Tensor
    start: int
    stop: int
    gradient: Tensor


@torch.no_grad()
def norm_of_gradients(
    gradients: Iterable[GradientRange],
    device: torch.device,
    power: float = 2.0,
    *,
    sharded: Sequence[Placement] | None = None,
) -> Tensor:
    """Return the norm of the whole model's gradients, the same on all ranks.

    Args:
        gradients: this rank's gradients.
        device: device of the result.
        power: the power of the norm, or inf.
        sharded: the placements of dense layers and of experts if each of their replicas has a part of the gradients, as
            with ZeRO; None if each has all of them.

    Returns:
        A 0-d tensor in the device's widest float.
    """
    # All ranks, even those without experts, take part in the sums of all placements.
    placements = list(dict.fromkeys(placements_of(None) if sharded is None else sharded))
    by_copies: dict[str, dict[int, list[Tensor]]] = {placement.axis: {} for placement in placements}
    for it in gradients:
        placement = placement_among(placements, it.parameter)
        for copies, part in _weighted_parts(it, placement, power):
            by_copies[placement.axis].setdefault(copies, []).append(part)
    totals = []
    for placement in placements:
        groups = (placement.parts,) if sharded is None else (placement.replicas, placement.parts)
        totals.append(_total(by_copies[placement.axis], power, groups, device))
    together = torch.stack(totals)
    return together.max() if math.isinf(power) else together.sum().pow(1.0 / power)


def _total(by_copies: dict[int, list[Tensor]], power: float, groups: Iterable[Group], device: torch.device) -> Tensor:
    """Return the norm to its power, or the largest magnitude, over the ranks of the groups; 0-d."""
    # Not in the gradients' dtype: other ranks may have another one, or none, and powers of float32 norms overflow.
    total = torch.zeros(1, dtype=widest_float(device), device=device)
    for copies, parts in by_copies.items():
        norms = torch.stack([_norm(part, power).to(total) for part in parts])
        total = torch.maximum(total, norms.max()) if math.isinf(power) else total + norms.pow(power).sum() / copies
    for group in groups:
        # Not a reduction by max, in which gloo and nccl may lose a NaN.
        total = all_gather(total, group).max().view(1) if math.isinf(power) else all_reduce_(total, group)
    return total.squeeze(0)


def _norm(tensor: Tensor, power: float) -> Tensor:
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(tensor, power, dtype=dtype)


def _weighted_parts(it: GradientRange, placement: Placement, power: float) -> list[tuple[int, Tensor]]:
    """Return `counted_parts`; on XLA, where these differ between ranks, all elements multiplied by their weights."""
    parameter, spec = it.parameter, get_shard_spec(it.parameter)
    if spec is None or not is_lazy_device(parameter) or is_tied_copy(parameter):
        return counted_parts(it, placement)
    if not (_has_several_boxes(parameter) or _differs_between_ranks(parameter)):
        return counted_parts(it, placement)
    placement.check(spec)
    return [(1, it.gradient * _weights(it, power))]


def counted_parts(it: GradientRange, placement: Placement) -> list[tuple[int, Tensor]]:
    """Return the parts of a gradient that count, and how many ranks hold each.

    Args:
        it: the gradient.
        placement: placement of the parameter.
    """
    if it.gradient.numel() == 0 or is_tied_copy(it.parameter):
        return []
    spec = get_shard_spec(it.parameter)
    if spec is None:
        return [(placement.copies, it.gradient)]
    placement.check(spec)
    if not _has_several_boxes(it.parameter):
        return [(spec.pieces[0].copies, it.gradient)]
    flat = it.gradient.reshape(-1)
    return [(shard.copies, shard.tensor) for shard in shards_of_range(it.parameter, it.start, it.stop, flat)]


def _has_several_boxes(parameter: Tensor) -> bool:
    """Whether a parameter is anything other than one box of one logical tensor."""
    spec = get_shard_spec(parameter)
    return spec is not None and not (len(spec.pieces) == 1 and spec.pieces[0].local.shape == spec.local_shape)


def _differs_between_ranks(parameter: Tensor) -> bool:
    """Whether the counted elements of this parameter may differ between ranks; the same on every rank."""
    spec = get_shard_spec(parameter)
    if spec is None or get_partition(parameter) is None:
        return False
    return is_padded_on_some_rank(parameter) or len(spec.pieces) > 1 or any(piece.copies > 1 for piece in spec.pieces)


_known_weights = WeakIdKeyDictionary()  # by parameter


def _weights(it: GradientRange, power: float) -> Tensor:
    """Return factors for a gradient before its norm, so that a sum over all ranks counts the model once.

    They are the number of copies to the power of -1/`power`, and 0 for elements that do not count. They are data,
    because their values differ between ranks. Their shape is the gradient's; for a gradient of the parameter's shape
    it may be 1 in all dims except the split one.
    """
    known: dict[tuple[int, int, float], Tensor] = _known_weights.setdefault(it.parameter, {})
    key = (it.start, it.stop, power)
    if key not in known:
        known[key] = _make_weights(it, power).to(it.gradient.device)
    return known[key]


@torch.inference_mode(False)
def _make_weights(it: GradientRange, power: float) -> Tensor:
    partition = get_partition(it.parameter)
    if partition is not None and it.gradient.shape == it.parameter.shape:
        spec, dim = get_shard_spec(it.parameter), partition.dim
        assert spec is not None
        rows = torch.zeros(spec.local_shape[dim])
        for piece in spec.pieces:
            rows[piece.local.slices[dim]] = piece.copies ** (-1 / power)
        shape = [1] * it.parameter.dim()
        shape[dim] = -1
        return rows.view(shape)
    flat = torch.zeros(it.gradient.numel())
    for shard in shards_of_range(it.parameter, it.start, it.stop, flat):
        shard.tensor.fill_(shard.copies ** (-1 / power))
    return flat.view(it.gradient.shape)


def _as_list(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(dict.fromkeys(parameters))


def _check_norm_type(norm_type: float | str) -> float:
    try:
        power = float(norm_type)
    except ValueError:
        power = math.nan
    if not power > 0:
        raise ValueError(f"norm_type={norm_type!r} must be a positive number or 'inf'")
    return power
