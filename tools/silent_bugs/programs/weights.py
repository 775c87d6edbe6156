"""Whole weights from one seed, the parts of them that a rank holds, and the batches that all programs share.

A program describes its shards by a table from a pattern of names to a `Shard`; parameters that no pattern matches are
whole on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from silent_bugs.programs.axis import Axis

VOCABULARY = 32
IGNORED = -100


@dataclass(frozen=True)
class Shard:
    """How an axis shards a parameter.

    Attributes:
        dim: the dimension that is split.
        parts: how many matrices are fused along `dim`; each is split on its own.
    """

    dim: int
    parts: int = 1

    def take(self, whole: Tensor, axis: Axis) -> Tensor:
        """Return this rank's part of a whole tensor."""
        parts = whole.chunk(self.parts, self.dim)
        return torch.cat([axis.part(part, self.dim) for part in parts], self.dim)

    def whole(self, local: Tensor, axis: Axis) -> Tensor:
        """Return the whole tensor, from the parts of all ranks of the axis."""
        ranks = [part.chunk(self.parts, self.dim) for part in axis.gather_list(local)]
        return torch.cat([torch.cat(parts, self.dim) for parts in zip(*ranks, strict=True)], self.dim)


def shard_of(name: str, shards: Mapping[str, Shard]) -> Shard | None:
    """Return how a parameter is sharded, None where it is whole."""
    return next((shard for pattern, shard in shards.items() if fnmatch(name, pattern)), None)


def whole_weight(name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the initial value of a whole parameter; it depends on nothing but its name and shape."""
    noise = torch.randn(shape, generator=generator(zlib.crc32(name.encode())), dtype=torch.float64)
    if name.endswith("norm.weight"):
        value = 1 + 0.1 * noise
    elif len(shape) == 1:
        value = 0.1 * noise
    elif "embedding" in name:
        value = 0.5 * noise
    else:
        value = noise / shape[-1] ** 0.5
    return value.to(dtype)


@torch.no_grad()
def fill(model: nn.Module, shards: Mapping[str, Shard], axis: Axis) -> None:
    """Set each parameter to this rank's part of the whole weights."""
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        shard = shard_of(name, shards)
        if shard is None:
            parameter.copy_(whole_weight(name, torch.Size(shape), parameter.dtype))
        else:
            shape[shard.dim] *= axis.size
            parameter.copy_(shard.take(whole_weight(name, torch.Size(shape), parameter.dtype), axis))


def whole_parameters(model: nn.Module, shards: Mapping[str, Shard], axis: Axis) -> dict[str, Tensor]:
    """Return the whole parameters by name; where a parameter is replicated, this rank's copy."""
    result = {}
    for name, parameter in model.named_parameters():
        shard = shard_of(name, shards)
        result[name] = parameter.detach().clone() if shard is None else shard.whole(parameter, axis)
    return result


def generator(seed: int) -> torch.Generator:
    """Return a generator with a seed."""
    return torch.Generator().manual_seed(seed)


def batch(step: int, *, rows: int = 4, length: int = 8) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels of a whole batch.

    The last tokens of a row have the label `IGNORED`, in later rows more of them: rows have unequal numbers of labels.

    Returns:
        tokens: [rows, length], int64.
        labels: [rows, length], int64.
    """
    rolled = torch.randint(VOCABULARY, (rows, length + 1), generator=generator(1000 + step))
    tokens, labels = rolled[:, :-1].clone(), rolled[:, 1:].clone()
    for row in range(rows):
        labels[row, length - row :] = IGNORED
    return tokens, labels


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new parameters of a dtype inside the `with` block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
