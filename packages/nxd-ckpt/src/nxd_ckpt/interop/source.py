"""The common interface of all formats: named tensors that stay in files until they are read.

Each format is opened in its own folder; this module has the interface that the writers need, and saves any source as a
checkpoint of this package.
"""

import fnmatch
import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from nxd_ckpt.boxes import Box, uncovered
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import is_remote
from nxd_ckpt.reader import Checkpoint, TensorInfo
from nxd_ckpt.saving import save_for_ranks
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE, OPAQUE

Progress = Callable[[str, int], None]
"""Called with a tensor's name and its size in bytes when it is done."""


class TensorSource(Protocol):
    """Named tensors in files, and the objects saved with them."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor."""

    @property
    def objects(self) -> Any:
        """JSON-serializable objects saved with the tensors; None if there are none."""

    @property
    def is_mapped(self) -> bool:
        """Whether shards are views of mapped files, so that holding all of them takes no extra memory."""

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """Return parts of a tensor that cover the box and possibly more; overlapping parts are equal there.

        Raises:
            CheckpointError: they cannot be read.
        """


def ignore_progress(name: str, num_bytes: int) -> None:
    """A progress callback that does nothing."""


def fill(source: TensorSource, name: str, box: Box, destination: torch.Tensor) -> None:
    """Copy a box of a tensor, converting it to the destination's type.

    Raises:
        CheckpointError: elements are missing or cannot be read.
    """
    shards = source.shards(name, box)
    missing = uncovered(box, [shard.box for shard in shards])
    if missing:
        raise CheckpointError(f"{name!r} {list(source.tensors[name].global_shape)}: no stored part holds {missing[0]}")
    for shard in shards:
        common = shard.box.intersect(box)
        if common is not None:
            destination[common.relative_to(box).slices].copy_(shard.tensor[common.relative_to(shard.box).slices])


def read_whole(source: TensorSource, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a whole, contiguous tensor on the CPU: a view of the mapped file if possible, otherwise a new tensor.

    Args:
        source: the source of the tensor.
        name: the tensor's name.
        dtype: dtype to convert to, see `converted`; default: as stored.

    Raises:
        CheckpointError: elements are missing or cannot be read.
    """
    info = source.tensors[name]
    wanted = converted(info.dtype, dtype)
    whole_box = Box.whole(info.global_shape)
    if wanted == info.dtype:
        shards = source.shards(name, whole_box)
        if len(shards) == 1 and shards[0].tensor.shape == info.global_shape:
            return shards[0].tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    whole = torch.empty(info.global_shape, dtype=wanted, device="cpu")
    fill(source, name, whole_box, whole)
    return whole


def read_box(source: TensorSource, name: str, box: Box) -> torch.Tensor:
    """Return a box of a tensor on the CPU; a box of the whole tensor is read by `read_whole`."""
    info = source.tensors[name]
    if box.shape == info.global_shape:
        return read_whole(source, name)
    part = torch.empty(box.shape, dtype=info.dtype, device="cpu")
    fill(source, name, box, part)
    return part


def converted(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is written: only floating-point tensors are converted, not counts and masks.

    Scales and 4-bit numbers, which are meaningless on their own, are not converted either.
    """
    is_number = stored.is_floating_point and CODE_OF_DTYPE.get(stored) not in OPAQUE
    return wanted if wanted is not None and is_number else stored


def num_bytes(info: TensorInfo) -> int:
    """Return the size of a whole tensor in bytes."""
    return Box.whole(info.global_shape).num_elements * info.dtype.itemsize


@dataclass(frozen=True)
class Selection:
    """A subset of a source's tensors.

    Args:
        source: the source of the tensors.
        include: shell patterns; a name must match at least one; empty: all names.
        exclude: shell patterns; a name must not match any.
        without: names to leave out as well.

    Raises:
        ValueError: the source has tensors, but none remain.
    """

    source: TensorSource
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    without: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.source.tensors and not self.tensors:
            raise ValueError(
                f"none of the {len(self.source.tensors)} tensors remain after include={list(self.include)}, "
                f"exclude={list(self.exclude)}"
            )

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of the selected tensors."""
        return {
            name: info
            for name, info in self.source.tensors.items()
            if (not self.include or _matches(name, self.include))
            and name not in self.without
            and not _matches(name, self.exclude)
        }

    @property
    def objects(self) -> Any:
        """All objects of the source."""
        return self.source.objects

    @property
    def is_mapped(self) -> bool:
        """As the source."""
        return self.source.is_mapped

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """As the source."""
        return self.source.shards(name, box)


@dataclass(frozen=True)
class Part:
    """The tensors below a path, by their names without it: those of a model saved as `{"model": model}`.

    Args:
        source: the source of the tensors.
        path: the path, such as "model".

    Raises:
        ValueError: there are no tensors below the path.
    """

    source: TensorSource
    path: str

    def __post_init__(self) -> None:
        if not self.tensors:
            found = ", ".join(sorted({name.split(".")[0] for name in self.source.tensors}))
            raise ValueError(f"there are no tensors below {self.path!r}; the tensors are below {found}")

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of the tensors."""
        prefix = f"{self.path}."
        return {
            name.removeprefix(prefix): info for name, info in self.source.tensors.items() if name.startswith(prefix)
        }

    @property
    def objects(self) -> Any:
        """All objects of the source."""
        return self.source.objects

    @property
    def is_mapped(self) -> bool:
        """As the source."""
        return self.source.is_mapped

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """As the source."""
        return self.source.shards(f"{self.path}.{name}", box)


@dataclass(frozen=True)
class _CheckpointSource:
    checkpoint: Checkpoint

    is_mapped = False

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.checkpoint.tensors

    @property
    def objects(self) -> Any:
        return self.checkpoint.objects

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        return [Shard(self.checkpoint.read_box(name, box.offsets, box.shape), box.offsets)]


def from_checkpoint(checkpoint: Checkpoint) -> TensorSource:
    """Return a checkpoint of this package as a source; only the requested elements are read."""
    return _CheckpointSource(checkpoint)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype and shape have the same bits, including NaN and -0.0."""
    a, b = (tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


_ALIGNMENT = 64


def save_source(
    source: TensorSource,
    path: "str | os.PathLike[str]",
    tag: str,
    *,
    dtype: torch.dtype | None = None,
    step: int | None = None,
    overwrite: bool = False,
    extra: Mapping[str, bytes] | None = None,
    rank_objects: Mapping[int, Any] | None = None,
    progress: Progress = ignore_progress,
) -> None:
    """Write a source as the checkpoint `tag`, with `source.objects` as its objects. Call it in one process.

    Arguments not described here are those of `save`.

    Memory: one part of one tensor. Disk, besides the result: temporarily the same size again, unless the source is
    mapped (Hugging Face, NeuronX) and keeps its dtype.

    Args:
        source: the tensors to write.
        dtype: dtype to convert floating-point tensors to; default: as stored.
        rank_objects: what each rank is to find as its `rank_objects`, by its number.
        progress: called after each tensor has been read.

    Raises:
        ValueError: a name or the tag is not allowed.
        CheckpointError: the source cannot be read, or the tag is taken.
    """
    targets = {
        name: TensorInfo(converted(info.dtype, dtype), info.global_shape) for name, info in source.tensors.items()
    }
    through_scratch = {
        name: info for name, info in targets.items() if not source.is_mapped or info.dtype != source.tensors[name].dtype
    }
    with _scratch_tensors(path, through_scratch) as scratch:
        state: dict[str, ShardedTensor | torch.Tensor] = {}
        for name, info in targets.items():
            if name in scratch:
                fill(source, name, Box.whole(info.global_shape), scratch[name])
                state[name] = scratch[name]
            else:
                found = source.shards(name, Box.whole(info.global_shape))
                shards = [Shard(shard.tensor.detach(), shard.offsets) for shard in found]
                state[name] = ShardedTensor(info.global_shape, shards, info.dtype)
            progress(name, num_bytes(info))
        save_for_ranks(
            path, tag, state, rank_objects or {}, objects=source.objects, step=step, overwrite=overwrite, extra=extra
        )


@contextmanager
def _scratch_tensors(
    path: "str | os.PathLike[str]", infos: Mapping[str, TensorInfo]
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield tensors backed by an unnamed temporary file, which disappears with the process at the latest."""
    begins: dict[str, int] = {}
    size = 0
    for name, info in infos.items():
        begins[name] = size
        size += -(-num_bytes(info) // _ALIGNMENT) * _ALIGNMENT
    if not size:
        yield {name: torch.empty(info.global_shape, dtype=info.dtype, device="cpu") for name, info in infos.items()}
        return
    with tempfile.TemporaryFile(dir=_scratch_folder(os.fspath(path))) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises an error here instead of a SIGBUS later
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        yield {
            name: memory[begins[name] : begins[name] + num_bytes(info)].view(info.dtype).reshape(info.global_shape)
            for name, info in infos.items()
        }


def _scratch_folder(path: str) -> str | None:
    """Return a folder on the checkpoints' disk, which has space for them; temporary folders may be in memory."""
    if is_remote(path):
        return None
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
