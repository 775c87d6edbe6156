"""`torch.distributed.checkpoint.save` and `load` with this package: torch plans each rank's part, and `nxd_ckpt.save`
writes it or `nxd_ckpt.load` reads it."""

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
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.safe_pickle import load_torch_stream
from nxd_ckpt.loading import load
from nxd_ckpt.reader import Checkpoint, open_checkpoint

OBJECTS_KEY = "torch_dcp"  # in each rank's rank_objects, for torch's key paths and the names of pickled objects


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
        """Take path and tag from torch's `checkpoint_id`, if given."""
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
        """Save and commit, on all ranks together.

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
            _StateToSave(plan, planner),
            rank_objects={OBJECTS_KEY: about},
            step=self._step,
            overwrite=self._overwrite,
            process_group=ThisProcess() if self._is_alone else self._process_group,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the manifest was committed with the data."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether it has both a folder and a tag."""
        return all(split_checkpoint_id(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        """Return the location of this checkpoint."""
        return StorageMeta(checkpoint_id=os.path.join(self._path, self._tag))


class _StateToSave(Mapping[str, ShardedTensor]):
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


class NxdStorageReader(StorageReader):
    """A `storage_reader` for checkpoints of this package, whether torch's `save` or `nxd_ckpt.save` wrote them.

    Objects that torch pickled are unpickled with restrictions, and passed on only as plain values: torch's own planner
    would run any code in them.

    Args:
        path: the folder for checkpoints, as for `nxd_ckpt.load`.
        tag: name of the checkpoint; default: the newest complete one. A `checkpoint_id` passed to torch's `load`,
            `<path>/<tag>`, replaces both.
        process_group: the process group passed to torch's `load`. With `no_dist=True` there, this process loads alone.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        tag: str | None = None,
        *,
        process_group: "dist.ProcessGroup | Coordinator | None" = None,
    ) -> None:
        self._path, self._tag, self._process_group = os.fspath(path), tag, process_group
        self._is_alone = False

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Take path and tag from torch's `checkpoint_id`, if given."""
        if checkpoint_id is not None:
            self._path, self._tag = split_checkpoint_id(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that torch's planners need: dtypes and shapes, each tensor as a single chunk.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        checkpoint = open_checkpoint(self._path, self._tag)
        self._tag = checkpoint.tag
        pickled, paths = _said_when_saving(checkpoint)
        entries: dict[str, Any] = {
            name: BytesStorageMetadata()
            if name in pickled
            else TensorStorageMetadata(
                properties=TensorProperties(dtype=info.dtype),
                size=torch.Size(info.global_shape),
                chunks=[ChunkStorageMetadata(torch.Size([0] * len(info.global_shape)), torch.Size(info.global_shape))],
            )
            for name, info in checkpoint.tensors.items()
        }
        return Metadata(state_dict_metadata=entries, planner_data=paths or None)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; `nxd_ckpt.load` does the setup."""
        self._is_alone = False

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. A single plan means that torch loads for this process alone (`no_dist`)."""
        self._is_alone = len(plans) == 1
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read the items of the plan, on all ranks together.

        Raises:
            CheckpointError: as for `nxd_ckpt.load`, or an object holds more than plain values.
        """
        wanted = _StateToLoad(plan, planner, open_checkpoint(self._path, self._tag))
        group = ThisProcess() if self._is_alone else self._process_group
        load(self._path, self._tag, into=wanted, strict=False, process_group=group)
        for item, tensor in wanted.tensors:
            planner.commit_tensor(item, tensor)
        for item, content in wanted.pickled:
            what = f"the object {item.storage_index.fqn!r} of checkpoint {self._tag!r}"
            value = load_torch_stream(io.BytesIO(content.numpy().tobytes()), what)
            plain = io.BytesIO()
            torch.save(value, plain)
            plain.seek(0)
            planner.load_bytes(item, plain)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether it has both a folder and a tag."""
        return all(split_checkpoint_id(checkpoint_id))


class _StateToLoad(Mapping[str, ShardedTensor]):
    """A plan's items as the destinations of a load. They are resolved inside `load`, where errors reach all ranks.

    Attributes:
        tensors: each item and the planner's memory for it.
        pickled: each item that is not a tensor, and the memory for its bytes.
    """

    def __init__(self, plan: LoadPlan, planner: LoadPlanner, checkpoint: Checkpoint) -> None:
        self._planner, self._stored = planner, checkpoint.tensors
        self._items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            self._items.setdefault(item.storage_index.fqn, []).append(item)
        self.tensors: list[tuple[ReadItem, torch.Tensor]] = []
        self.pickled: list[tuple[ReadItem, torch.Tensor]] = []
        self._resolved: dict[str, ShardedTensor] = {}

    def __getitem__(self, name: str) -> ShardedTensor:
        if name not in self._stored:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        if name not in self._resolved:
            self._resolved[name] = self._resolve(name)
        return self._resolved[name]

    def _resolve(self, name: str) -> ShardedTensor:
        info = self._stored[name]
        shards = []
        for item in self._items[name]:
            if item.type is LoadItemType.BYTE_IO:
                content = torch.empty(info.global_shape, dtype=info.dtype, device="cpu")
                self.pickled.append((item, content))
                shards.append(Shard(content, (0,)))
            else:
                tensor = self._planner.resolve_tensor(item)
                self.tensors.append((item, tensor))
                shards.append(Shard(tensor.detach(), tuple(item.storage_offsets)))
        return ShardedTensor(info.global_shape, shards)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _said_when_saving(checkpoint: Checkpoint) -> tuple[set[str], dict[str, tuple[Any, ...]]]:
    """Return the names of pickled objects, and each name's path in the nested state; empty unless torch saved it."""
    pickled: set[str] = set()
    paths: dict[str, tuple[Any, ...]] = {}
    for said in checkpoint.rank_objects.values():
        about = said.get(OBJECTS_KEY, {}) if isinstance(said, dict) else {}
        pickled.update(about.get("pickled", []))
        paths.update({name: tuple(path) for name, path in about.get("paths", {}).items()})
    return pickled, paths
