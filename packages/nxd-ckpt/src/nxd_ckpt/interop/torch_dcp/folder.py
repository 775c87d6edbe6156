"""Folders of torch's file system writer: `.metadata`, and files with each box of each tensor, saved by torch.save.

`.metadata` is a pickle, which may only contain torch's plain classes here.
"""

import gc
import io
import os
import pathlib
import pickle
import pickletools
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import regular_file
from nxd_ckpt.interop.safe_pickle import load_torch_stream
from nxd_ckpt.interop.source import Progress, TensorSource, converted, ignore_progress, num_bytes, read_whole
from nxd_ckpt.manifest import is_possible_shape
from nxd_ckpt.objects import check_json
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 2**30
_CLASSES = (
    "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING"
)

_ALLOWED: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in _CLASSES.split()},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
}

# A checkpoint_id that was a Path is unpickled as a pure path; it is neither used nor opened here.
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath"}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return pathlib.PurePosixPath
        raise pickle.UnpicklingError(f"asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("asks for another file")


def read_metadata(folder: str) -> Metadata:
    """Read `.metadata` without running any code in it.

    Raises:
        CheckpointError: it is missing or damaged, or asks for something that is not allowed.
    """
    path = os.path.join(folder, METADATA_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{folder} holds no {METADATA_FILE}; torch writes it last, so there is no complete checkpoint"
        )
    if os.path.getsize(path) > MAX_METADATA_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_METADATA_BYTES} bytes")
    with open(path, "rb") as file:
        content = file.read()
    try:
        _check_numbers(content)
        found = _MetadataUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} {error}, and is refused or damaged; none of its code was run") from error
    except Exception as error:  # a damaged pickle can make its classes raise anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected torch's Metadata")
    return found


def _check_numbers(content: bytes) -> None:
    """Raise ValueError if a pickle has lengths beyond its end or numbers its values higher than it has bytes.

    Python allocates what such a number says before it reads on: 16 bytes for each possible value.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name.endswith("PUT") and int(argument or 0) > len(content):
            raise ValueError(f"it numbers a value {argument}, but has only {len(content)} bytes")


_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.distcp")


@dataclass(frozen=True, slots=True)
class _StoredItem:
    """A box of a tensor (None: a pickled object), and the bytes of the file that hold it, written by torch.save."""

    box: Box | None
    file: str
    offset: int
    length: int


class TorchDcpFolder:
    """The tensors of a folder, by the names under which torch stored them.

    Attributes:
        paths: the keys by which each tensor was reached in the saved state, such as ("model", "0.weight").
    """

    is_mapped = False

    def __init__(self, folder: str, metadata: Metadata) -> None:
        self._folder = folder
        self.tensors, self._parts = _describe(metadata)
        self.paths = _paths(metadata, self.tensors)
        self.objects = self._read_objects([name for name in self._parts if name not in self.tensors])

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """Read the stored parts of a tensor that overlap the box."""
        return [
            Shard(self._load_tensor(name, part, part.box), part.box.offsets)
            for part in self._parts[name]
            if part.box is not None and part.box.intersect(box) is not None
        ]

    def _load_tensor(self, name: str, part: _StoredItem, box: Box) -> torch.Tensor:
        tensor = self._load(name, part)
        expected = (self.tensors[name].dtype, box.shape)
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_meta
        if not is_plain or (tensor.dtype, tuple(tensor.shape)) != expected:
            found = f"{tensor.dtype} {list(tensor.shape)}" if is_plain else f"a {type(tensor).__name__}"
            raise CheckpointError(
                f"{part.file} holds {found} for {name!r} {box}, but {METADATA_FILE} says "
                f"{expected[0]} {list(box.shape)}"
            )
        return tensor

    def _load(self, name: str, part: _StoredItem) -> Any:
        path = os.path.join(self._folder, part.file)
        try:
            with regular_file(path) as file:
                file.seek(part.offset)
                content = file.read(part.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if len(content) != part.length:
            raise CheckpointError(
                f"{path} ends early: {name!r} should be {part.length} bytes starting at byte {part.offset}"
            )
        return load_torch_stream(io.BytesIO(content), f"{name!r} in {path}")

    def _read_objects(self, names: Sequence[str]) -> dict[str, Any] | None:
        objects = {}
        for name in names:
            try:
                value = self._load(name, self._parts[name][0])
                check_json(value, name)
            except (CheckpointError, ValueError) as error:
                warnings.warn(f"leaving out an object: {error}", stacklevel=4)
            else:
                objects[name] = value
        return objects or None


def open_torch_dcp(folder: "str | os.PathLike[str]") -> TorchDcpFolder:
    """Open a folder that `torch.distributed.checkpoint.save` wrote. Everything is unpickled with restrictions.

    Other objects are kept if they are plain JSON-serializable values, and otherwise left out with a warning.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged, not allowed, or written with extensions.
    """
    path = os.fspath(folder)
    metadata = read_metadata(path)
    try:
        return TorchDcpFolder(path, metadata)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{os.path.join(path, METADATA_FILE)} cannot be used: {error}") from error


def write_torch_dcp(
    source: TensorSource,
    folder: "str | os.PathLike[str]",
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = ignore_progress,
) -> None:
    """Write a folder for `torch.distributed.checkpoint.load`, with a file for each tensor. Call it in one process.

    Memory: the largest tensor. The source's objects are not written.

    Args:
        source: the tensors to write.
        folder: the folder to write to; created if missing.
        dtype: dtype to convert floating-point tensors to; default: as stored.
        progress: function called after each tensor is read.

    Raises:
        ValueError: the folder is not empty.
        CheckpointError: the source cannot be read.
    """
    path = os.fspath(folder)
    if os.path.isdir(path) and os.listdir(path):
        raise ValueError(f"{path} is not empty; remove it or choose another folder")
    state = {
        name: torch.empty(info.global_shape, dtype=converted(info.dtype, dtype), device="meta")
        for name, info in source.tensors.items()
    }
    # With a file for each tensor, torch's writer releases a tensor before it requests the next one.
    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=1)
    try:
        dcp.save(state, storage_writer=writer, planner=_StreamingPlanner(source, dtype, progress), no_dist=True)
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{path} could not be written: {cause}") from cause


class _StreamingPlanner(dcp.DefaultSavePlanner):
    """Plans with tensors that have no data, and reads each one when the writer asks for it."""

    def __init__(self, source: TensorSource, dtype: torch.dtype | None, progress: Progress) -> None:
        super().__init__()
        self._source, self._dtype, self._progress = source, dtype, progress

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        gc.collect(1)  # torch 2.9 leaves the tensor before this one in a reference cycle
        name = write_item.index.fqn
        tensor = read_whole(self._source, name, self._dtype)
        self._progress(name, num_bytes(self._source.tensors[name]))
        # torch.save writes a tensor's whole storage, which may be a whole mapped file.
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _describe(metadata: Metadata) -> tuple[dict[str, TensorInfo], dict[str, list[_StoredItem]]]:
    tensors: dict[str, TensorInfo] = {}
    parts: dict[str, list[_StoredItem]] = {}
    places: Mapping[MetadataIndex, Any] = metadata.storage_data
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError(f"a name is {name!r}, expected text")
        if isinstance(entry, BytesStorageMetadata):
            parts[name] = [_stored_item(name, None, places[MetadataIndex(name)])]
        elif isinstance(entry, TensorStorageMetadata):
            tensors[name] = info = TensorInfo(entry.properties.dtype, tuple(entry.size))
            if info.dtype not in CODE_OF_DTYPE:
                raise ValueError(f"{name!r} is {info.dtype}, which cannot be stored")
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            numbers = [*info.global_shape, *(number for box in boxes for number in (*box.offsets, *box.shape))]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError(f"{name!r} has sizes or offsets that are not non-negative integers")
            if not is_possible_shape(info.global_shape, info.dtype.itemsize):
                raise ValueError(f"{name!r} has the shape {list(info.global_shape)}, which is too large")
            if not all(box.fits_in(info.global_shape) for box in boxes):
                raise ValueError(f"{name!r} {list(info.global_shape)} has a part outside of it")
            parts[name] = [_stored_item(name, box, places[MetadataIndex(name, box.offsets)]) for box in boxes]
        else:
            raise TypeError(f"{name!r} is described by a {type(entry).__name__}")
    return tensors, parts


def _paths(metadata: Metadata, names: Iterable[str]) -> dict[str, tuple[str | int, ...]]:
    """Return the keys that torch's planner joined to each name; a name alone if it flattened nothing."""
    flattened = metadata.planner_data or {}
    paths = {name: tuple(flattened.get(name, (name,))) for name in names}
    for name, path in paths.items():
        if not path or not all(isinstance(key, str | int) for key in path):
            raise ValueError(f"{name!r} has the path {path!r}, expected keys and indices")
    return paths


def _stored_item(name: str, box: Box | None, place: Any) -> _StoredItem:
    file, offset, length = place.relative_path, place.offset, place.length
    if getattr(place, "transform_descriptors", None):
        raise ValueError(
            f"{name!r} was written with the extensions {place.transform_descriptors}; only plain files are read"
        )
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        raise ValueError(f"{name!r} is listed in {file!r}, which is not the plain name of a .distcp file")
    if not all(type(number) is int and number >= 0 for number in (offset, length)):
        raise ValueError(f"{name!r} is listed as {length!r} bytes starting at byte {offset!r}")
    return _StoredItem(box, file, offset, length)
