"""Small helpers of the tests: two usual ways to cut a tensor, and comparison bit by bit."""

from collections.abc import Callable

import pytest
import torch
from nxd_ckpt import Shard, ShardedTensor

Cut = Callable[[torch.Tensor, int, int], ShardedTensor]


@pytest.fixture(scope="session")
def rows_of() -> Cut:
    """`rows_of(whole, rank, world_size)`: this rank's even share of dim 0, as a view."""

    def cut(whole: torch.Tensor, rank: int, world_size: int) -> ShardedTensor:
        count = whole.shape[0] // world_size
        offsets = (rank * count,) + (0,) * (whole.ndim - 1)
        return ShardedTensor(whole.shape, [Shard(whole[rank * count : (rank + 1) * count], offsets)])

    return cut


@pytest.fixture(scope="session")
def columns_of() -> Cut:
    """`columns_of(whole, rank, world_size)`: this rank's even share of dim 1, as a strided view."""

    def cut(whole: torch.Tensor, rank: int, world_size: int) -> ShardedTensor:
        count = whole.shape[1] // world_size
        return ShardedTensor(whole.shape, [Shard(whole[:, rank * count : (rank + 1) * count], (0, rank * count))])

    return cut


@pytest.fixture(scope="session")
def bits() -> Callable[[torch.Tensor], list[int]]:
    """A tensor's bytes, so that NaN, -0.0 and types without arithmetic compare as they lie in memory."""

    def view(tensor: torch.Tensor) -> list[int]:
        plain: list[int] = tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).tolist()
        return plain

    return view
