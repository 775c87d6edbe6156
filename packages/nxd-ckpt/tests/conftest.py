"""Small helpers of the tests: two usual ways to cut a tensor, and comparison bit by bit."""

from collections.abc import Callable, Iterator

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


@pytest.fixture(scope="session")
def random_tensor() -> Callable[..., torch.Tensor]:
    """`random_tensor(shape, dtype, seed=0)`: any bit pattern that the type allows, NaN included."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        data = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return data.view(dtype).reshape(shape)

    return make


@pytest.fixture
def s3_connections() -> Iterator[None]:
    """Closes the connections of a test: s3fs gives itself a tenth of a second for that, and then leaves them open."""
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs: pip install 'nxd-ckpt[s3]'")
    import fsspec.asyn

    yield
    for filesystem in s3fs.S3FileSystem._cache.values():  # one for each thread
        fsspec.asyn.sync(filesystem.loop, filesystem.s3.__aexit__, None, None, None)
    s3fs.S3FileSystem.clear_instance_cache()
