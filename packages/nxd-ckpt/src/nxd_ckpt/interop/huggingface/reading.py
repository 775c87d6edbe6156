"""Opening a Hugging Face folder: which file holds which tensor, and the tensors as views of the mapped files."""

import json
import mmap
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.huggingface.header import StoredTensor, read_header
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


class _HuggingFaceFolder:
    is_mapped = True
    objects: Any = None

    def __init__(self, files: Mapping[str, Mapping[str, StoredTensor]]) -> None:
        self._places = {name: (path, tensor) for path, tensors in files.items() for name, tensor in tensors.items()}
        self._memory: dict[str, torch.Tensor] = {}
        self.tensors: Mapping[str, TensorInfo] = {name: stored.info for name, (_, stored) in self._places.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        path, stored = self._places[name]
        if path not in self._memory:
            self._memory[path] = _map_file(path)
        content = self._memory[path][stored.begin : stored.begin + stored.num_bytes]
        if stored.begin % stored.info.dtype.itemsize:
            content = content.clone()  # processors and torch want elements at multiples of their size
        tensor = content.view(stored.info.dtype).reshape(stored.info.global_shape)
        return [Shard(tensor, (0,) * tensor.ndim)]


def open_hugging_face(folder: "str | os.PathLike[str]") -> TensorSource:
    """Opens the tensors of a Hugging Face folder, or of a single safetensors file. All headers are read and checked.

    The files must not change while the result or a tensor of it is in use.

    Raises:
        CheckpointError: there is no model, the index and the files contradict one another, or a file is damaged.
    """
    path = os.fspath(folder)
    if os.path.isfile(path):
        return _HuggingFaceFolder({path: read_header(path)})
    if os.path.isfile(os.path.join(path, INDEX_FILE)):
        return _HuggingFaceFolder(_read_indexed(path))
    single = os.path.join(path, SINGLE_FILE)
    if os.path.isfile(single):
        return _HuggingFaceFolder({single: read_header(single)})
    raise CheckpointError(f"{path} holds neither {INDEX_FILE} nor {SINGLE_FILE}")


def _read_indexed(folder: str) -> dict[str, dict[str, StoredTensor]]:
    index = os.path.join(folder, INDEX_FILE)
    file_of = _read_index(index)
    files = {name: read_header(os.path.join(folder, name)) for name in sorted(set(file_of.values()))}
    found = {(name, file) for file, tensors in files.items() for name in tensors}
    expected = set(file_of.items())
    if found != expected:
        problems = [f"{name!r} should be in {file} but is not" for name, file in sorted(expected - found)]
        problems += [
            f"{name!r} is in {file}, of which the index knows nothing" for name, file in sorted(found - expected)
        ]
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"{index} does not fit the files:\n  " + "\n  ".join(problems[:8]) + more)
    return {os.path.join(folder, file): tensors for file, tensors in files.items()}


def _read_index(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
        if len(text) > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(text)["weight_map"]
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
                raise ValueError(f"it says that {name!r} is in {file_name!r}, which is no plain file name")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be used: {type(error).__name__}: {error}") from error
    return dict(weight_map)


def _map_file(path: str) -> torch.Tensor:
    """The bytes of a file as a tensor that must not be written to."""
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not writable
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)
