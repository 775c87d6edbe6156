"""Locates a rank's part within a whole tensor and measures their difference.

Activations carry no shard metadata, so the split is inferred from their shapes: along one dim by replicas and
microbatches, along another by tensor-parallel ranks. If the shapes allow several placements, the closest one counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

SMALL_SHARE = 1e-3  # tensors far below their peers, such as gradients of pure rounding, use this share as scale


@dataclass(frozen=True)
class Part:
    """Which part of a batch and of a layer a rank computes.

    Attributes:
        batch_index: index of the rank's part of the batch, among `batch_parts`.
        batch_parts: replicas x microbatches.
        tp_rank: rank in its tensor-parallel group.
        tp_size: number of ranks in that group.
    """

    batch_index: int
    batch_parts: int
    tp_rank: int
    tp_size: int


@dataclass(frozen=True)
class Distance:
    """The largest difference of two tensors and its place; see `Difference`."""

    max_abs: float
    max_rel: float
    index: tuple[int, ...]
    expected: float
    found: float


def readings(whole: Sequence[int], local: Sequence[int], part: Part) -> Iterator[tuple[slice, ...]]:
    """Yield the boxes of a whole tensor that a rank's part may cover, judging by its shape."""
    if len(whole) != len(local):
        return
    dims = range(len(whole))
    batch_dims = dims if part.batch_parts > 1 else [None]
    shard_dims = [None, *dims] if part.tp_size > 1 else [None]  # None: every rank has all of it
    for batch_dim, shard_dim in product(batch_dims, shard_dims):
        index, parts = [0] * len(whole), [1] * len(whole)
        if batch_dim is not None:
            index[batch_dim], parts[batch_dim] = part.batch_index, part.batch_parts
        if shard_dim is not None and shard_dim != batch_dim:
            index[shard_dim], parts[shard_dim] = part.tp_rank, part.tp_size
        if all(local[dim] * parts[dim] == whole[dim] for dim in dims):
            yield tuple(slice(index[dim] * local[dim], (index[dim] + 1) * local[dim]) for dim in dims)


def distance(expected: Tensor, found: Tensor, offset: Sequence[int] = ()) -> Distance:
    """Measure how far apart two tensors of one shape are; `offset` is added to the place. NaN equals only NaN."""
    if expected.numel() == 0:
        return Distance(0.0, 0.0, (), 0.0, 0.0)
    wanted, got = expected.double(), found.double()
    apart = (wanted - got).abs()
    apart = torch.where(wanted.isnan() & got.isnan() | (wanted == got), torch.zeros(()).double(), apart)
    apart = apart.nan_to_num(nan=float("inf"), posinf=float("inf"))
    flat = int(apart.argmax())
    place = tuple(int(it) for it in torch.unravel_index(torch.tensor(flat), apart.shape))
    scale = wanted.abs().nan_to_num().max().item()
    largest = apart.flatten()[flat].item()
    return Distance(
        largest,
        largest / scale if scale else (float("inf") if largest else 0.0),
        tuple(it + start for it, start in zip(place, offset or (0,) * len(place), strict=True)),
        wanted.flatten()[flat].item(),
        got.flatten()[flat].item(),
    )


def is_close(found: Distance, expected: Tensor, *, rtol: float, peers: float) -> bool:
    """Whether a difference is only rounding.

    Args:
        found: the difference.
        expected: the whole tensor of one process.
        rtol: tolerance, relative to its largest value.
        peers: the largest value in all tensors of its kind.
    """
    scale = expected.abs().nan_to_num().max().item() if expected.numel() else 0.0
    return found.max_abs <= rtol * max(scale, SMALL_SHARE * peers)
