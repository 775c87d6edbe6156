"""The `.metadata` file of a torch distributed checkpoint: a pickle that may only contain torch's plain classes."""

import io
import os
import pathlib
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from nxd_ckpt.errors import CheckpointError

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
    """Reads `.metadata` without running any code in it.

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
        found = _MetadataUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} {error}, and is refused or damaged; none of its code was run") from error
    except Exception as error:  # a damaged pickle can make its classes raise anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected torch's Metadata")
    return found
