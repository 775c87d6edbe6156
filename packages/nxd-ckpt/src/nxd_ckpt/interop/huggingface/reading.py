"""Opens a Hugging Face folder: finds the file of each tensor, checks headers, and returns views of the mapped files.

Files are chosen as in transformers: those that the config names, else a single file, else several with an index.
"""

import json
import math
import mmap
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import has_file, regular_file
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.manifest_text import without_repeats
from nxd_ckpt.objects import is_unicode
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.safetensors_file import as_header
from nxd_ckpt.sharded_tensor import Shard
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE, DTYPE_OF_CODE, in_safetensors

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_METADATA = "__metadata__"
_SIZE_LIMIT = 2**48  # what processors can address
_CONVERT = "convert it to safetensors, for example with `save_pretrained` of transformers"

_OTHER_KINDS = {  # by their first bytes
    b"PK\x03\x04": f"a zip archive, as torch.save writes; {_CONVERT}",
    b"\x80\x02": f"a pickle, as torch.save writes; {_CONVERT}",
    b"GGUF": f"a GGUF file of llama.cpp; {_CONVERT}",
    b"version https://git-lfs.github.com/spec/v1": (
        "a pointer of Git LFS, without the weights; fetch them by `git lfs pull`"
    ),
}


class _UnknownType(Exception):
    """A tensor of a valid file has a type that torch does not support."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; its first element is at byte `begin` of the file."""

    info: TensorInfo
    begin: int
    num_bytes: int


def read_header(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file after checking its size.

    Raises:
        CheckpointError: there is no such file, or it is not a complete safetensors file.
    """
    try:
        with regular_file(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            beginning = file.read(64)
            for magic, found in _OTHER_KINDS.items():
                if beginning.startswith(magic):
                    raise ValueError(f"it is {found}")
            file.seek(8)
            length = int.from_bytes(beginning[:8], "little")
            if file_size < 8 or length > min(MAX_HEADER_BYTES, file_size - 8):
                raise ValueError(f"its header claims {length} bytes of {file_size}, at most {MAX_HEADER_BYTES} allowed")
            content = json.loads(file.read(length), object_pairs_hook=without_repeats)
        return _parse(content, payload_begin=8 + length, file_size=file_size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except _UnknownType as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def make_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file that holds these tensors in this order.

    Raises:
        ValueError: a name is not allowed in a safetensors file, or the header would be too long to read back.
    """
    if refused := [name for name in tensors if name == _METADATA or not is_unicode(name)]:
        raise ValueError(f"{refused[0]!r} cannot be a name in a safetensors file; leave it out")
    content: dict[str, Any] = {_METADATA: dict(metadata)}
    begin = 0
    for name, info in tensors.items():
        end = begin + Box.whole(info.global_shape).num_elements * info.dtype.itemsize
        if info.dtype == torch.complex128:
            raise ValueError(f"{name!r} is complex128, which safetensors files do not have; leave it out")
        code, shape = in_safetensors(CODE_OF_DTYPE[info.dtype], info.global_shape)
        content[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = as_header(content)
    if len(header) > 8 + MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {len(tensors)} tensors is {len(header) - 8} bytes long; use a smaller max_shard_size"
        )
    return header


def _parse(content: dict[str, Any], *, payload_begin: int, file_size: int) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, entry in content.items():
        if name == _METADATA:
            continue
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if code not in DTYPE_OF_CODE or code == "C128":
            raise _UnknownType(
                f"{name!r} has the type {code!r}, for which torch {torch.__version__} has no dtype; use one of "
                f"{', '.join(it for it in DTYPE_OF_CODE if it != 'C128')}"
            )
        if not _are_sizes((*shape, begin, end)) or math.prod(size or 1 for size in shape) >= _SIZE_LIMIT:
            raise ValueError(f"{name!r} has the shape {list(shape)} and the bytes {begin} to {end}")
        dtype = DTYPE_OF_CODE[code]
        if code == "F4":  # torch counts pairs of these
            if not shape or shape[-1] % 2:
                raise _UnknownType(f"{name!r} has the type 'F4' and the shape {list(shape)}; torch needs an even size")
            shape = (*shape[:-1], shape[-1] // 2)
        if end - begin != Box.whole(shape).num_elements * dtype.itemsize:
            raise ValueError(f"{name!r} {code} {list(shape)} cannot be the bytes {begin} to {end}")
        tensors[name] = StoredTensor(TensorInfo(dtype, shape), payload_begin + begin, end - begin)
    position = payload_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if tensor.begin != position:
            raise ValueError(
                f"{name!r} begins at byte {tensor.begin}, expected {position}: tensors overlap or have holes"
            )
        position += tensor.num_bytes
    if position != file_size:
        raise ValueError(f"its tensors end at byte {position}, but the file at {file_size}")
    return tensors


def _are_sizes(numbers: Iterable[object]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
MAX_INDEX_BYTES = 100_000_000
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_INDEX_NAME = re.compile(rf"{_FILE_NAME.pattern}\.index\.json")
_VARIANT = re.compile(r"model\.(?:safetensors\.index\.)?([A-Za-z0-9_-]+)\.(?:safetensors|json)")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


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
            content = content.clone()  # processors and torch need aligned elements
        tensor = content.view(stored.info.dtype).reshape(stored.info.global_shape)
        return [Shard(tensor, (0,) * tensor.ndim)]


def open_hugging_face(folder: "str | os.PathLike[str]") -> TensorSource:
    """Open the tensors of a Hugging Face folder, or of a single safetensors file. All headers are read and checked.

    The files must not change while the result or one of its tensors is in use.

    Raises:
        CheckpointError: there is no model, the index and the files do not match, or a file is damaged.
    """
    path = os.fspath(folder)
    if os.path.isfile(path):
        return _HuggingFaceFolder({path: read_header(path)})
    chosen = _chosen_by_config(path) or next((it for it in (SINGLE_FILE, INDEX_FILE) if has_file(path, it)), None)
    if chosen is None:
        raise CheckpointError(_nothing_to_open(path))
    if _INDEX_NAME.fullmatch(chosen):
        return _HuggingFaceFolder(_read_indexed(path, chosen))
    single = os.path.join(path, chosen)
    return _HuggingFaceFolder({single: read_header(single)})


def holds_model(folder: str) -> bool:
    """Whether `open_hugging_face` finds files to open in a folder."""
    return _chosen_by_config(folder) is not None or has_file(folder, SINGLE_FILE) or has_file(folder, INDEX_FILE)


def _chosen_by_config(folder: str) -> str | None:
    """Return the file or index named by the config's `transformers_weights`; transformers then reads no other file."""
    try:
        with open(os.path.join(folder, CONFIG_FILE), "rb") as file:
            config = json.loads(file.read(MAX_INDEX_BYTES))
        chosen = config.get("transformers_weights") if isinstance(config, dict) else None
    except (OSError, ValueError, RecursionError):  # weights can be read without a config
        return None
    if chosen is not None and not (
        isinstance(chosen, str) and (_FILE_NAME.fullmatch(chosen) or _INDEX_NAME.fullmatch(chosen))
    ):
        raise CheckpointError(
            f"{os.path.join(folder, CONFIG_FILE)} says that the weights are in {chosen!r}, which is not the plain name "
            "of a safetensors file or its index"
        )
    return chosen


def _nothing_to_open(folder: str) -> str:
    """Return why a folder cannot be opened: what it has instead, and what to do."""
    if not os.path.isdir(folder):
        return f"{folder!r} does not exist" if not os.path.lexists(folder) else f"{folder!r} is not a folder or file"
    found = other_kind(folder)
    return f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}" + (f", but {found}" if found else "")


def other_kind(folder: str) -> str:
    """Describe files that look like a model but cannot be read, and what to do; "" if there are none."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    pickles = [name for name in names if name in _PICKLES]
    variants = sorted({match[1] for name in names if (match := _VARIANT.fullmatch(name))} - {"index"})
    others = [name for name in names if name.endswith(".safetensors")]
    files = [name for name in names if name.endswith((".gguf", ".bin", ".pt", ".pth", ".ckpt"))]
    found = ""
    if "adapter_config.json" in names:
        found = "an adapter of PEFT; load it into its base model, or merge it there first"
    elif "model_index.json" in names:
        found = "a diffusers pipeline of several models; pass the file of one, such as one in its folder unet"
    elif pickles:
        found = (
            f"{pickles[0]}, a pickle, which is not read; convert it with transformers: "
            f"AutoModelForCausalLM.from_pretrained({folder!r}).save_pretrained('NEW FOLDER')"
        )
    elif variants:
        found = (
            f"the variants {', '.join(variants)}, which transformers selects with variant=; rename the files of the "
            "one you want, or pass its file"
        )
    elif others:
        found = f"{', '.join(others[:3])}; pass the file itself"
    elif files:
        found = f"{files[0]}, which is not read; convert it to safetensors"
    return found


def _read_indexed(folder: str, name: str) -> dict[str, dict[str, StoredTensor]]:
    index = os.path.join(folder, name)
    file_of = read_index(index, _FILE_NAME)
    files = {name: read_header(os.path.join(folder, name)) for name in sorted(set(file_of.values()))}
    found = {(name, file) for file, tensors in files.items() for name in tensors}
    expected = set(file_of.items())
    if found != expected:
        problems = [f"{name!r} should be in {file} but is not" for name, file in sorted(expected - found)]
        problems += [
            f"{name!r} is in {file}, but the index does not list it" for name, file in sorted(found - expected)
        ]
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"{index} does not match the files:\n  " + "\n  ".join(problems[:8]) + more)
    return {os.path.join(folder, file): tensors for file, tensors in files.items()}


def read_index(path: str, file_names: re.Pattern[str]) -> dict[str, str]:
    """Return the file of each tensor by an index, whose file names must match the pattern.

    Raises:
        CheckpointError: the index is missing, damaged or too long, or names another file.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
        if len(text) > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(text)["weight_map"]
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not file_names.fullmatch(file_name):
                raise ValueError(f"it says that {name!r} is in {file_name!r}, which is not a plain file name")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be used: {type(error).__name__}: {error}") from error
    return dict(weight_map)


def _map_file(path: str) -> torch.Tensor:
    """Map a file as a read-only tensor of bytes."""
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not writable
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)
