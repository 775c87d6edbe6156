"""Sharded, crash-safe checkpoints that load at any layout.

Save and load `{logical name: ShardedTensor | torch.Tensor}` with one process or many. The package does not know how a
trainer shards its tensors: a `ShardedTensor` only says which boxes of a global tensor this rank holds.
"""

from nxd_ckpt.asynchronous.handle import AsyncSave
from nxd_ckpt.asynchronous.saving import async_save, end_async_saves
from nxd_ckpt.catalog import CheckpointInfo, latest, list_checkpoints
from nxd_ckpt.coordinator import Coordinator
from nxd_ckpt.errors import CheckpointError, MismatchError
from nxd_ckpt.loading import LoadedObjects, load
from nxd_ckpt.reader import Checkpoint, CheckpointPart, TensorInfo, open_checkpoint
from nxd_ckpt.retention import delete, gc, pin, retain, unpin
from nxd_ckpt.saving import save
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor
from nxd_ckpt.stores import Garbage
from nxd_ckpt.training_state import PerRank

__all__ = [
    # what a rank holds
    "Shard",
    "ShardedTensor",
    "PerRank",
    # by all ranks together
    "save",
    "async_save",
    "AsyncSave",
    "end_async_saves",
    "load",
    "LoadedObjects",
    "Coordinator",
    # by one process
    "open_checkpoint",
    "Checkpoint",
    "CheckpointPart",
    "TensorInfo",
    "list_checkpoints",
    "CheckpointInfo",
    "latest",
    "delete",
    "pin",
    "unpin",
    "retain",
    "gc",
    "Garbage",
    # when it goes wrong
    "CheckpointError",
    "MismatchError",
]
