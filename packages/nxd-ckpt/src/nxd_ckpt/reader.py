"""Reads boxes of a checkpoint's tensors: from one process with `open_checkpoint`, from many through `loading.py`.

A read is planned and checked as a whole (coverage, files, sizes) before the first byte is written to a destination.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.catalog import find_tag, read_manifest
from nxd_ckpt.dtypes import DTYPE_OF_CODE
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import existing_file
from nxd_ckpt.manifest import Chunk, Manifest
from nxd_ckpt.plan import plan_read
from nxd_ckpt.sharded_tensor import Shard
from nxd_ckpt.store import check_sizes, data_path, root_folder
from nxd_ckpt.tensor_bytes import read_tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of one logical tensor in a checkpoint."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of one chunk and the memory that it goes to."""

    chunk: Chunk
    box: Box
    destination: torch.Tensor

    @property
    def place(self) -> tuple[str, int]:
        """Sort key: the order in which the disk holds the chunks."""
        return self.chunk.file, self.chunk.offset


class Checkpoint:
    """One checkpoint, open for reading. Needs no process group; holds no file open.

    Attributes:
        tag: its name.
        step: the step it was saved at, if that was given.
        objects: what `save` was given as objects.
        rank_objects: each saving rank's rank_objects.
        world_size: how many ranks saved it.
        tensors: dtype and global shape of every logical tensor.
    """

    def __init__(self, root: str, tag: str, manifest: Manifest) -> None:
        self._root = root
        self._manifest = manifest
        self.tag = tag
        self.step = manifest.step
        self.save_id = manifest.save_id
        self.world_size = manifest.world_size
        self.objects = manifest.objects
        self.rank_objects: Mapping[int, Any] = manifest.rank_objects
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(DTYPE_OF_CODE[entry.dtype], entry.global_shape) for name, entry in manifest.tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Returns a whole logical tensor on the CPU.

        Raises:
            ValueError: there is no tensor of this name.
            CheckpointError: a data file is missing or damaged.
        """
        shape = self._info(name).global_shape
        return self.read_box(name, (0,) * len(shape), shape)

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Returns the box of this shape that begins at `offsets`, reading no more than it.

        Raises:
            ValueError: there is no tensor of this name, or the box does not lie inside it.
            CheckpointError: a data file is missing or damaged.
        """
        info = self._info(name)
        box = Box(tuple(offsets), tuple(shape))
        if len(box.offsets) != len(box.shape) or not box.fits_in(info.global_shape):
            raise ValueError(
                f"the box with offsets {list(offsets)} and shape {list(shape)} does not lie inside {name!r} "
                f"{list(info.global_shape)}"
            )
        tensor = torch.empty(box.shape, dtype=info.dtype)
        self.fill(self.plan({name: [Shard(tensor, box.offsets)]}))
        return tensor

    def plan(self, wanted: Mapping[str, Sequence[Shard]]) -> list[Transfer]:
        """Finds where every element comes from, and that the files are there; touches no destination.

        Raises:
            CheckpointError: elements are not in the checkpoint, or files are missing or of a wrong size; lists all.
        """
        transfers: list[Transfer] = []
        problems: list[str] = []
        for name, shards in wanted.items():
            for shard in shards:
                reads, missing = plan_read(shard.box, self._manifest.tensors[name].chunks)
                problems.extend(f"{name!r}: no data for {box}" for box in missing)
                for read in reads:
                    destination = shard.tensor.detach()[read.box.relative_to(shard.box).slices()]
                    transfers.append(Transfer(read.chunk, read.box.relative_to(read.chunk.box), destination))
        if problems:
            raise CheckpointError("the checkpoint lacks elements:\n  " + "\n  ".join(problems))
        files = sorted({transfer.chunk.file for transfer in transfers})
        check_sizes((data_path(self._root, self.tag, file), self._manifest.files[file]) for file in files)
        return sorted(transfers, key=attrgetter("place"))

    def fill(self, transfers: Sequence[Transfer]) -> None:
        """Reads what was planned, file by file.

        Raises:
            CheckpointError: a file cannot be read; destinations may be filled in part.
        """
        for file, group in groupby(transfers, key=lambda transfer: transfer.chunk.file):
            path = data_path(self._root, self.tag, file)
            try:
                with existing_file(path) as fd:
                    for transfer in group:
                        chunk = transfer.chunk
                        read_tensor(fd, chunk.offset, chunk.box.shape, transfer.box, transfer.destination)
            except (OSError, CheckpointError) as error:
                raise CheckpointError(f"data file {path} cannot be read: {error}") from error

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ValueError(
                f"checkpoint {self.tag!r} has no tensor {name!r}; it has {len(self.tensors)}, see .tensors"
            )
        return self.tensors[name]


def open_checkpoint(path: "str | os.PathLike[str]", tag: str | None = None) -> Checkpoint:
    """Opens a checkpoint for reading in this process alone.

    Args:
        path: the folder that was given to `save`.
        tag: which one; default: the newest complete one.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such checkpoint, or its manifest is damaged.
    """
    root = root_folder(path)
    found = find_tag(root, tag)
    return Checkpoint(root, found, read_manifest(root, found))
