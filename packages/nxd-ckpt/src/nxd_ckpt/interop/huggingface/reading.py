"""Opens a Hugging Face folder: finds the file of each tensor, and returns tensors as views of the mapped files.

Files are chosen as in transformers: those that the config names, else a single file, else several with an index.
"""

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
    """Opens the tensors of a Hugging Face folder, or of a single safetensors file. All headers are read and checked.

    The files must not change while the result or one of its tensors is in use.

    Raises:
        CheckpointError: there is no model, the index and the files do not match, or a file is damaged.
    """
    path = os.fspath(folder)
    if os.path.isfile(path):
        return _HuggingFaceFolder({path: read_header(path)})
    chosen = _chosen_by_config(path) or next((it for it in (SINGLE_FILE, INDEX_FILE) if _has(path, it)), None)
    if chosen is None:
        raise CheckpointError(_nothing_to_open(path))
    if _INDEX_NAME.fullmatch(chosen):
        return _HuggingFaceFolder(_read_indexed(path, chosen))
    single = os.path.join(path, chosen)
    return _HuggingFaceFolder({single: read_header(single)})


def holds_model(folder: str) -> bool:
    """Whether `open_hugging_face` finds files to open in a folder."""
    return _chosen_by_config(folder) is not None or _has(folder, SINGLE_FILE) or _has(folder, INDEX_FILE)


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


def _has(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))


def _read_indexed(folder: str, name: str) -> dict[str, dict[str, StoredTensor]]:
    index = os.path.join(folder, name)
    file_of = _read_index(index)
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


def _read_index(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
        if len(text) > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(text)["weight_map"]
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
                raise ValueError(f"it says that {name!r} is in {file_name!r}, which is not a plain file name")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be used: {type(error).__name__}: {error}") from error
    return dict(weight_map)


def _map_file(path: str) -> torch.Tensor:
    """Map a file as a read-only tensor of bytes."""
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not writable
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)
