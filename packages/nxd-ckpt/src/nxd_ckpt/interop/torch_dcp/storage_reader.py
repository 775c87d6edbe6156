"""`torch.distributed.checkpoint.load` for this package's checkpoints: a rank reads only the items in torch's plan."""

import io
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from nxd_ckpt.coordinator import Coordinator, ThisProcess
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.safe_pickle import load_torch_stream
from nxd_ckpt.interop.torch_dcp.storage_writer import OBJECTS_KEY, split_checkpoint_id
from nxd_ckpt.loading import load
from nxd_ckpt.reader import Checkpoint, open_checkpoint
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor

if TYPE_CHECKING:
    import torch.distributed as dist


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
        """Takes path and tag from torch's `checkpoint_id`, if given."""
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
        """Does nothing; `nxd_ckpt.load` does the setup."""
        self._is_alone = False

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. A single plan means that torch loads for this process alone (`no_dist`)."""
        self._is_alone = len(plans) == 1
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Reads the items of the plan, on all ranks together.

        Raises:
            CheckpointError: as for `nxd_ckpt.load`, or an object holds more than plain values.
        """
        wanted = _PlannedState(plan, planner, open_checkpoint(self._path, self._tag))
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


class _PlannedState(Mapping[str, ShardedTensor]):
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
