"""Reads boxes of a checkpoint's tensors: from one process with `open_checkpoint`, from many through `loading.py`.

A read is planned and checked as a whole (coverage, files, sizes) before the first byte is written to a destination.
"""

import operator
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch

from nxd_ckpt.arguments import check_flags
from nxd_ckpt.boxes import Box
from nxd_ckpt.catalog import find_tag, read_manifest
from nxd_ckpt.checksums import BlockCheck, blocks_with_hashes
from nxd_ckpt.chunk_reads import Read, Transfer, reads_of_chunk, reads_to_verify, with_overlaps
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import Manifest
from nxd_ckpt.plan import PlannedRead, plan_read
from nxd_ckpt.sharded_tensor import Shard
from nxd_ckpt.stores import ReadRange, Store, open_store
from nxd_ckpt.stores.manifests import check_files
from nxd_ckpt.tensor_bytes import DTYPE_OF_CODE

# Small reads are batched until they are worth a system call or a request; a batch is held in memory.
_CALL_BYTES = 2**21  # fits into a processor's cache until it is hashed
_REQUEST_BYTES = 16 * 2**20
_BATCH_READS = 1000


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype and shape of one logical tensor in a checkpoint."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        """`global_shape` as a `torch.Size`."""
        return torch.Size(self.global_shape)


class Checkpoint:
    """One checkpoint, open for reading. Needs no process group and keeps no file open.

    Attributes:
        tag: its name.
        step: the `step` passed to `save`, if any.
        manifest: its complete description, including the location and hashes of each chunk.
        mesh: the `mesh` passed to `save`.
        objects: the `objects` passed to `save`.
        rank_objects: the `rank_objects` of each rank that saved.
        world_size: number of ranks that saved it.
        tensors: dtype and global shape of every logical tensor.
    """

    def __init__(self, store: Store, tag: str, manifest: Manifest, *, verify: bool = True) -> None:
        self._store = store
        self._verify = verify
        self._verified_headers: set[str] = set()
        self.tag = tag
        self.manifest = manifest
        self.step = manifest.step
        self.save_id = manifest.save_id
        self.world_size = manifest.world_size
        self.mesh = manifest.mesh
        self.objects = manifest.objects
        self.rank_objects: Mapping[int, Any] = manifest.rank_objects
        for name, entry in manifest.tensors.items():
            if entry.dtype not in DTYPE_OF_CODE:
                raise CheckpointError(
                    f"{name!r} of checkpoint {tag!r} is {entry.dtype}, which torch {torch.__version__} lacks; "
                    "use a newer torch"
                )
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(DTYPE_OF_CODE[entry.dtype], entry.global_shape) for name, entry in manifest.tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a whole logical tensor on the CPU.

        Raises:
            ValueError: there is no tensor of this name.
            CheckpointError: a data file is missing or damaged.
        """
        shape = self._info(name).global_shape
        return self.read_box(name, (0,) * len(shape), shape)

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the box of this shape at `offsets`. Reads only the box, or the blocks that hold it to verify them.

        Raises:
            ValueError: there is no tensor of this name, or the box is not inside it.
            CheckpointError: a data file is missing or damaged.
        """
        info = self._info(name)
        try:
            box = Box(tuple(map(operator.index, offsets)), tuple(map(operator.index, shape)))
        except TypeError:
            raise ValueError(f"offsets={offsets!r} and shape={shape!r} are not lists of whole numbers") from None
        if len(box.offsets) != len(box.shape) or not box.fits_in(info.global_shape):
            raise ValueError(
                f"the box with offsets {list(offsets)} and shape {list(shape)} does not lie inside {name!r} "
                f"{list(info.global_shape)}"
            )
        reads = self.locate({name: [box]})[name]  # before allocating memory, as the manifest may be wrong
        tensor = torch.empty(box.shape, dtype=info.dtype, device="cpu")
        self.fill(self._transfers(name, Shard(tensor, box.offsets), reads[0]))
        return tensor

    def part(self, path: str) -> "CheckpointPart":
        """Return the tensors below a path, such as those of a model saved as `{"model": model, ...}`.

        Raises:
            ValueError: there are no tensors below the path.
        """
        names = {name.removeprefix(f"{path}."): name for name in self.tensors if name.startswith(f"{path}.")}
        if not names:
            found = ", ".join(sorted({name.split(".")[0] for name in self.tensors}))
            raise ValueError(f"checkpoint {self.tag!r} has no tensors below {path!r}; its tensors are below {found}")
        return CheckpointPart(self, names)

    def locate(self, wanted: Mapping[str, Sequence[Box]]) -> dict[str, list[list[PlannedRead]]]:
        """Locate every element of each box and check that the files exist; allocates no memory for the data.

        Raises:
            CheckpointError: elements are missing, or files are missing or have the wrong size; lists all of them.
        """
        found: dict[str, list[list[PlannedRead]]] = {name: [] for name in wanted}
        problems: list[str] = []
        for name, boxes in wanted.items():
            for box in boxes:
                reads, missing = plan_read(box, self.manifest.tensors[name].chunks)
                problems.extend(f"{name!r}: no data for {hole}" for hole in missing)
                found[name].append(reads)
        if problems:
            raise CheckpointError("the checkpoint lacks elements:\n  " + "\n  ".join(problems))
        files = {read.chunk.file for of_name in found.values() for reads in of_name for read in reads}
        self._check_sizes(sorted(files))
        return found

    @property
    def extra(self) -> list[str]:
        """Names of the files passed to `save` as `extra`."""
        return list(self.manifest.extra)

    def read_extra(self, name: str) -> bytes:
        """Return the verified content of a file passed to `save` as `extra`.

        Raises:
            ValueError: there is no file of this name.
            CheckpointError: it is missing or damaged.
        """
        if name not in self.manifest.extra:
            raise ValueError(f"checkpoint {self.tag!r} has no extra file {name!r}; it has {self.extra or 'none'}")
        entry = self.manifest.extra[name]
        self._check_sizes([entry.file])
        content = bytearray(self.manifest.files[entry.file])
        blocks = (
            Read(start, memoryview(content)[start:stop], BlockCheck(start, stop - start, expected), None)
            for start, stop, expected in blocks_with_hashes(len(content), entry.hashes)
        )
        self._run(entry.file, blocks)
        return bytes(content)

    def plan(self, wanted: Mapping[str, Sequence[Shard]]) -> list[Transfer]:
        """Plan reads into the memory of shards, as `locate` does for boxes; changes no destination.

        Raises:
            CheckpointError: as for `locate`.
        """
        found = self.locate({name: [shard.box for shard in shards] for name, shards in wanted.items()})
        transfers = [
            transfer
            for name, shards in wanted.items()
            for shard, reads in zip(shards, found[name], strict=True)
            for transfer in self._transfers(name, shard, reads)
        ]
        return sorted(transfers, key=lambda transfer: (transfer.chunk, transfer.dtype, transfer.box))

    def fill(self, transfers: Sequence[Transfer]) -> None:
        """Run planned reads, file by file; the first read of a file also verifies its header.

        Raises:
            CheckpointError: a file cannot be read or is damaged; destinations may be partially filled.
        """
        transfers = with_overlaps(transfers) if self._verify else transfers
        for file, of_file in groupby(transfers, key=lambda transfer: transfer.chunk.file):
            with_header = self._verify and file not in self._verified_headers
            self._run(file, chain(self._reads_of_header(file) if with_header else (), self._reads(of_file)))
            self._verified_headers.add(file)

    def damage(self) -> list[str]:
        """Read everything and return the problems found by file; an empty list if there are none."""
        problems: list[str] = []
        for file in self.manifest.files:
            try:
                self._check_sizes([file])
                self._run(file, self._reads_of_blocks(file))
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    def check_files(self) -> None:
        """Check that all files exist with the right sizes.

        Raises:
            CheckpointError: a file is missing or has the wrong size; names all of them.
        """
        self._check_sizes(self.manifest.files)

    def _reads(self, transfers: Iterable[Transfer]) -> Iterator[Read]:
        # Several tensors may share the same bytes, each with its own shape and dtype.
        for _, of_chunk in groupby(transfers, key=lambda transfer: (transfer.chunk, transfer.dtype)):
            yield from reads_of_chunk(list(of_chunk), verify=self._verify)

    def _reads_of_blocks(self, file: str) -> Iterator[Read]:
        stretches = [
            (chunk.offset, chunk.num_bytes, chunk.hashes)
            for entry in self.manifest.tensors.values()
            for chunk in entry.chunks
            if chunk.file == file
        ] + [
            (0, self.manifest.files[file], entry.hashes) for entry in self.manifest.extra.values() if entry.file == file
        ]
        yield from self._reads_of_header(file)
        for offset, num_bytes, hashes in sorted(stretches):
            yield from reads_to_verify(offset, num_bytes, hashes)

    def _reads_of_header(self, file: str) -> Iterator[Read]:
        header = self.manifest.headers.get(file)
        if header is not None:
            yield from reads_to_verify(0, header.num_bytes, header.hashes)

    def _transfers(self, name: str, shard: Shard, reads: Iterable[PlannedRead]) -> list[Transfer]:
        dtype, memory = self.manifest.tensors[name].dtype, shard.tensor.detach()
        return [
            Transfer(
                read.chunk,
                dtype,
                read.box.relative_to(read.chunk.box),
                memory[read.box.relative_to(shard.box).slices],
            )
            for read in reads
        ]

    def where(self, file: str) -> str:
        """Return the full path of one of its files, for messages; it may belong to another checkpoint in the root."""
        return self._store.where(self._tag_of(file), file)

    def _tag_of(self, file: str) -> str:
        return self.manifest.references.get(file, self.tag)

    def _run(self, file: str, reads: Iterable[Read]) -> None:
        where, tag = self.where(file), self._tag_of(file)
        try:
            with closing(self._read_batches(tag, file, reads)) as batches:  # no read outlives an error
                for read in chain.from_iterable(batches):
                    if read.check is not None:
                        read.check.update(read.memory)
                    if read.finish is not None:
                        read.finish()
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"data file {where} cannot be read: {error}") from error

    def _read_batches(self, tag: str, file: str, reads: Iterable[Read]) -> Generator[list[Read]]:
        """Yield reads once they are done; in a remote store, the next batch is read in the meantime."""

        def read(batch: list[Read]) -> list[Read]:
            self._store.read_into(tag, file, [ReadRange(read.offset, read.memory) for read in batch])
            return batch

        if not self._store.capabilities.remote:  # the system reads ahead
            yield from map(read, _batches(reads, _CALL_BYTES))
            return
        with ThreadPoolExecutor(1, "nxd-ckpt read") as thread:
            under_way: list[Future[list[Read]]] = []
            for batch in _batches(reads, _REQUEST_BYTES):
                under_way.append(thread.submit(read, batch))
                if len(under_way) == 2:
                    yield under_way.pop(0).result()
            for last in under_way:
                yield last.result()

    def _check_sizes(self, files: Iterable[str]) -> None:
        check_files(self._store, self.tag, self.manifest, files)

    def _info(self, name: str) -> TensorInfo:
        if not isinstance(name, str) or name not in self.tensors:
            raise ValueError(
                f"checkpoint {self.tag!r} has no tensor {name!r}; it has {len(self.tensors)} tensors, see .tensors"
            )
        return self.tensors[name]


@dataclass(frozen=True)
class CheckpointPart:
    """Tensors of a checkpoint under other names.

    Attributes:
        checkpoint: the checkpoint that holds them.
        names: the name in the checkpoint, by the name here.
    """

    checkpoint: Checkpoint
    names: Mapping[str, str]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Dtype and global shape of each tensor."""
        return {name: self.checkpoint.tensors[full_name] for name, full_name in self.names.items()}

    def read(self, name: str) -> torch.Tensor:
        """As `Checkpoint.read`."""
        return self.checkpoint.read(self.names.get(name, name))

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """As `Checkpoint.read_box`."""
        return self.checkpoint.read_box(self.names.get(name, name), offsets, shape)


def open_checkpoint(path: "str | os.PathLike[str]", tag: str | None = None, *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint for reading in this process alone.

    Args:
        path: the folder passed to `save`.
        tag: name of the checkpoint; default: the newest one.
        verify: compare the data with its checksums; reads whole blocks of 16 MiB even if less is requested.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such checkpoint, or its manifest is damaged. Without a tag, also if the manifest
            of any other checkpoint is damaged: it may be the newest.
    """
    check_flags(verify=verify)
    store = open_store(path)
    found = find_tag(store, tag)
    return Checkpoint(store, found, read_manifest(store, found), verify=verify)


def _batches(reads: Iterable[Read], most_bytes: int) -> Iterator[list[Read]]:
    """Group consecutive reads into small batches with ascending offsets."""
    batch: list[Read] = []
    num_bytes = end = 0
    for read in reads:
        if batch and read.offset < end:
            yield batch
            batch, num_bytes = [], 0
        batch.append(read)
        num_bytes += len(read.memory)
        end = read.offset + len(read.memory)
        if len(batch) == _BATCH_READS or num_bytes >= most_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
