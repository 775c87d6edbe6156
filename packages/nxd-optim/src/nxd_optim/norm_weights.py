"""Weights, as data, for norms of gradients whose counted parts differ between ranks: on XLA all ranks record one graph.

The rows of a parameter that are padding, or copies of rows on other ranks, differ from rank to rank.
"""

import functools

import torch
from nxd_state import ShardSpec, get_shard_spec, is_padded_on_some_rank
from torch import Tensor


def differs_between_ranks(parameter: Tensor) -> bool:
    """Whether what counts of this parameter may be another part of it on another rank; the same on every rank."""
    spec = get_shard_spec(parameter)
    if spec is None or not hasattr(parameter, "partition_dim"):
        return False
    return is_padded_on_some_rank(parameter) or len(spec.pieces) > 1 or any(piece.copies > 1 for piece in spec.pieces)


def row_weights(parameter: Tensor, power: float) -> Tensor:
    """What to multiply a gradient by before its norm, so that a sum over all ranks counts the model once.

    Args:
        parameter: one that `differs_between_ranks`.
        power: of the norm.

    Returns:
        1 long in all dims but the one that is split: the number of copies to the power of -1/`power`; 0 at padding.
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
