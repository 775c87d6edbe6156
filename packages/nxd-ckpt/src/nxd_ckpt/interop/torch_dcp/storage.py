"""`torch.distributed.checkpoint.save` with this package: torch plans each rank's part, `nxd_ckpt.save` writes it."""

import io
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from nxd_ckpt.coordinator import Coordinator, ThisProcess
from nxd_ckpt.saving import save
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor

if TYPE_CHECKING:
    import torch.distributed as dist

OBJECTS_KEY = "torch_dcp"
"""The key in each rank's rank_objects for torch's key paths and the names of pickled objects."""


class NxdStorageWriter(StorageWriter):
    """A `storage_writer` for this package's checkpoints: committed as a whole, and readable without torch's reader.

    Objects other than tensors are stored as the bytes that torch pickled, and are only unpickled with restrictions.

    Args:
        path: the folder for checkpoints, as for `nxd_ckpt.save`.
        tag: name of the checkpoint. A `checkpoint_id` passed to torch's `save`, `<path>/<tag>`, replaces both.
        step: as for `nxd_ckpt.save`.
        overwrite: as for `nxd_ckpt.save`.
        process_group: the process group passed to torch's `save`. With `no_dist=True` there, this process saves alone.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        tag: str,
        *,
        step: int | None = None,
        overwrite: bool = False,
        process_group: "dist.ProcessGroup | Coordinator | None" = None,
    ) -> None:
        self._path, self._tag = os.fspath(path), tag
        self._step, self._overwrite, self._process_group = step, overwrite, process_group
        self._is_alone = False
        self._use_collectives = True

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Takes path and tag from torch's `checkpoint_id`, if given."""
        if checkpoint_id is not None:
            self._path, self._tag = split_checkpoint_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Only records whether ranks plan together; `nxd_ckpt.save` does the rest."""
        self._is_alone = False
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged. A single plan means that torch saves for this process alone (`no_dist`)."""
        self._is_alone = self._use_collectives and len(plans) == 1
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Saves and commits, on all ranks together.

        Raises:
            ValueError: as for `nxd_ckpt.save`.
            CheckpointError: as for `nxd_ckpt.save`.
        """
        about = {
            "pickled": [item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO],
            "paths": {name: list(path) for name, path in (plan.planner_data or {}).items()},
        }
        save(
            self._path,
            self._tag,
            _PlannedState(plan, planner),
            rank_objects={OBJECTS_KEY: about},
            step=self._step,
            overwrite=self._overwrite,
            process_group=ThisProcess() if self._is_alone else self._process_group,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the manifest was committed with the data."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether it has both a folder and a tag."""
        return all(split_checkpoint_id(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        """Return the location of this checkpoint."""
        return StorageMeta(checkpoint_id=os.path.join(self._path, self._tag))


class _PlannedState(Mapping[str, ShardedTensor]):
    """A plan's items as the state of a save. They are resolved inside `save`, where errors reach all ranks."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._plan, self._planner = plan, planner
        self._items: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            self._items.setdefault(item.index.fqn, []).append(item)

    def __getitem__(self, name: str) -> ShardedTensor:
        global_shape: tuple[int, ...] = ()
        shards = []
        for item in self._items[name]:
            data = self._planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                data = torch.from_numpy(np.frombuffer(data.getvalue(), dtype=np.uint8).copy())
            if not isinstance(data, torch.Tensor):
                raise ValueError(
                    f"torch's planner gave a {type(data).__name__} for {name!r}, expected a tensor or bytes"
                )
            if item.tensor_data is None:
                global_shape, offsets = tuple(data.shape), (0,) * data.ndim
            else:
                global_shape, offsets = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
            shards.append(Shard(data.detach(), offsets))
        return ShardedTensor(global_shape, shards)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def split_checkpoint_id(checkpoint_id: "str | os.PathLike[str]") -> tuple[str, str]:
    """Split torch's `checkpoint_id`, a single path, into folder and tag."""
    folder, _, tag = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
    return folder, tag
