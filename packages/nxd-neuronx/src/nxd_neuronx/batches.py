"""Helpers for seeds, batches and token tensors, applied before the model."""

import random
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from nxd_state import (
    get_context_parallel_rank,
    get_context_parallel_size,
    model_parallel_is_initialized,
    seed_model_parallel,
)
from torch import Tensor

IGNORED_LABEL = -100  # of the losses of torch, transformers and nxd_layers

ValueT = TypeVar("ValueT")


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, and with an initialized mesh this rank's streams of nxd_state."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if model_parallel_is_initialized():
        seed_model_parallel(seed)


def shift_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shift `labels` one token to the left, so that each position has its next token's label.

    Args:
        batch: tensors by name; `labels` `[batch, seq]`.

    Returns:
        The same tensors, and new `labels` `[batch, seq]` whose last column is ignored by losses (-100).
    """
    shifted = dict(batch)
    if "labels" in batch:
        labels = batch["labels"]
        ignored = labels.new_full((labels.shape[0], 1), IGNORED_LABEL)
        shifted["labels"] = torch.cat([labels[:, 1:], ignored], dim=1)
    return shifted


def get_batch_on_this_context_parallel_rank(batch: Mapping[str, ValueT]) -> Mapping[str, ValueT]:
    """Return this context-parallel rank's part of a batch along the sequence; labels are shifted first.

    The parts are neighboring positions, as `nki_ring_attn_func` takes them. Models of transformers and
    `LlamaForCausalLM` cut their sequences themselves, and are given whole batches.

    Args:
        batch: tensors `[batch, seq, ...]` by name; None and tensors with one position are not cut.

    Returns:
        `[batch, seq/cp, ...]`; the batch itself where there is one rank.

    Raises:
        ValueError: the ranks do not divide a sequence.
    """
    if not model_parallel_is_initialized() or get_context_parallel_size() == 1:
        return batch
    size, rank = get_context_parallel_size(), get_context_parallel_rank()
    parts: dict[str, Any] = dict(batch)
    for name, value in shift_labels(parts).items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] > 1:
            if value.shape[1] % size:
                raise ValueError(
                    f"{name} has {value.shape[1]} positions, which context_parallel_size={size} does not divide; pad "
                    f"it to {-(-value.shape[1] // size) * size}"
                )
            parts[name] = value.chunk(size, dim=1)[rank].contiguous()
    return parts


def cumsum(tensor: Tensor, dim: int = 0, tril_size: int = 2048) -> Tensor:
    """Running sums of a matrix along its first dim, added up in float64 and rounded once.

    Args:
        tensor: `[tokens, n]` of any dtype.
        dim: 0.
        tril_size: size of the blocks that the old runtime multiplied; accepted without effect.

    Returns:
        `[tokens, n]` of the same dtype.

    Raises:
        ValueError: the tensor is not a matrix.
        NotImplementedError: another dim.
    """
    if tensor.dim() != 2:
        raise ValueError(f"cumsum takes a 2-d tensor, got shape {tuple(tensor.shape)}; use torch.cumsum")
    if dim != 0:
        raise NotImplementedError(f"cumsum along dim={dim}; only dim=0 is supported, use torch.cumsum")
    return tensor.to(torch.float64).cumsum(dim=0).to(tensor.dtype)
