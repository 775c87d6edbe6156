"""What scripts do to seeds, batches and token tensors before a model sees them."""

import random
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from nxd_state import get_context_parallel_size, model_parallel_is_initialized, seed_model_parallel
from torch import Tensor

IGNORED_LABEL = -100  # of the losses of torch, transformers and nxd_layers

ValueT = TypeVar("ValueT")


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, and with an initialised mesh this rank's streams of nxd_state."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if model_parallel_is_initialized():
        seed_model_parallel(seed)


def shift_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with `labels` moved one token to the left, so that each position has its next token's label.

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
    """This rank's part of a batch along the sequence: all of it, as there is no context parallelism.

    Raises:
        NotImplementedError: the mesh has context-parallel ranks.
    """
    size = get_context_parallel_size() if model_parallel_is_initialized() else 1
    if size > 1:
        raise NotImplementedError(
            f"context_parallel_size={size}: cutting a batch along the sequence comes with context parallelism; use "
            "context_parallel_size=1, with sequence_parallel=True for long sequences"
        )
    return batch


def cumsum(tensor: Tensor, dim: int = 0, tril_size: int = 2048) -> Tensor:
    """Running sums of a matrix along its first dim, added up in float64 and rounded once.

    Args:
        tensor: `[tokens, n]` of any dtype.
        dim: 0.
        tril_size: size of the blocks that the old runtime multiplied; of no effect.

    Returns:
        `[tokens, n]` of the same dtype.

    Raises:
        ValueError: the tensor is no matrix.
        NotImplementedError: another dim.
    """
    if tensor.dim() != 2:
        raise ValueError(f"cumsum takes a 2-d tensor, got shape {tuple(tensor.shape)}; use torch.cumsum")
    if dim != 0:
        raise NotImplementedError(f"cumsum along dim={dim}; only dim=0 is supported, use torch.cumsum")
    return tensor.to(torch.float64).cumsum(dim=0).to(tensor.dtype)
