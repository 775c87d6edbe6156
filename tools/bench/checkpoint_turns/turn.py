"""One rank's tensors, and the same memory as each library wants it described."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from nxd_ckpt import Shard, ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as ShardPlacement


@dataclass(frozen=True)
class Size:
    """How many ranks share how many float32 tensors `[rows, columns]`, cut by rows."""

    world_size: int
    num_tensors: int
    rows: int
    columns: int

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return self.num_tensors * self.rows * self.columns * 4


class UnderWay(Protocol):
    """A save in the background."""

    def wait(self) -> None:
        """Returns when it has ended."""


class Turn:
    """What one rank holds and where it saves it."""

    def __init__(self, rank: int, folder: Path, size: Size) -> None:
        self.rank = rank
        self.folder = folder
        self.size = size
        self.global_shape = (size.rows, size.columns)
        self.mesh = init_device_mesh("cpu", (size.world_size,))
        own = size.rows // size.world_size
        generator = torch.Generator().manual_seed(rank)
        self.local = {
            f"layer.{i}": torch.randn(own, size.columns, generator=generator) for i in range(size.num_tensors)
        }
        self.copies: dict[str, torch.Tensor] = {}
        self.under_way: UnderWay | None = None
        self.changed_bytes = 0  # by the preparation of an incremental save

    def place(self, name: str) -> Path:
        """Where a variant keeps its files."""
        return self.folder / name

    def by_rows(self) -> dict[str, ShardedTensor | torch.Tensor]:
        """The local tensors as this rank's rows of global ones."""
        first = self.rank * self.size.rows // self.size.world_size
        return {
            name: ShardedTensor(self.global_shape, [Shard(tensor, (first, 0))]) for name, tensor in self.local.items()
        }

    def by_columns(self) -> dict[str, ShardedTensor | torch.Tensor]:
        """The same memory as this rank's columns of global tensors."""
        columns = self.size.columns // self.size.world_size
        return {
            name: ShardedTensor(self.global_shape, [Shard(tensor, (0, self.rank * columns))])
            for name, tensor in self._as_columns().items()
        }

    def dtensors_by_rows(self) -> dict[str, torch.Tensor]:
        """As `by_rows`, for torch."""
        return self._as_dtensors(self.local, 0)

    def dtensors_by_columns(self) -> dict[str, torch.Tensor]:
        """As `by_columns`, for torch."""
        return self._as_dtensors(self._as_columns(), 1)

    def _as_columns(self) -> dict[str, torch.Tensor]:
        rows, columns = self.size.rows, self.size.columns // self.size.world_size
        return {name: tensor.view(rows, columns) for name, tensor in self.local.items()}

    def _as_dtensors(self, local: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
        placements: list[Placement] = [ShardPlacement(dim)]
        return {name: DTensor.from_local(tensor, self.mesh, placements) for name, tensor in local.items()}
