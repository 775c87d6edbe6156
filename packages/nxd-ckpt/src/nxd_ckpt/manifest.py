"""The manifest: what a checkpoint holds and where its bytes lie. A folder is a checkpoint once it has a whole one.

Here it is written as JSON text and read back with every field checked, since a manifest may come from anywhere. The
README specifies the format. Which boxes go into which file is decided in `plan.py`.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.boxes import Box
from nxd_ckpt.dtypes import DTYPE_OF_CODE
from nxd_ckpt.errors import CheckpointError

FORMAT = "nxd-ckpt"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
DATA_FOLDER = "data"

_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_DATA_FILE = re.compile(r"[0-9a-f]{32}-[0-9]{5,}-[0-9]+\.safetensors")
_DIGEST_FIELD = re.compile(rb'"digest":"([0-9a-f]{64})"')
_NO_DIGEST = b'"digest":"' + b"0" * 64 + b'"'


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box: `num_bytes` bytes from `offset` on in `file`, row-major; `key` is its name in that file."""

    file: str
    key: str
    offset: int
    num_bytes: int
    box: Box


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One logical tensor; `dtype` is the safetensors name, such as "BF16"."""

    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known of one checkpoint. `files` gives the size in bytes of each data file."""

    save_id: str
    step: int | None
    committed_at: float
    world_size: int
    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    objects: Any
    rank_objects: Mapping[int, Any]

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key from old to new; checkpoints without a step come before those with one."""
        return (-1 if self.step is None else self.step, self.committed_at, self.save_id)


def data_file_name(save_id: str, writer: int, number: int = 0) -> str:
    """Name of one writer's data file, unique to this save."""
    return f"{save_id}-{writer:05d}-{number}.safetensors"


def is_data_file_name(name: str) -> bool:
    """Whether this package could have written a data file of this name."""
    return _DATA_FILE.fullmatch(name) is not None


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON text. Its digest is the sha256 of that text with the digest's digits all zero."""
    content = {
        "digest": "0" * 64,
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "save_id": manifest.save_id,
        "step": manifest.step,
        "committed_at": manifest.committed_at,
        "world_size": manifest.world_size,
        "objects": manifest.objects,
        "rank_objects": {str(rank): value for rank, value in manifest.rank_objects.items()},
        "files": dict(manifest.files),
        "tensors": {name: _tensor_to_json(entry) for name, entry in manifest.tensors.items()},
    }
    text = json.dumps(content, separators=(",", ":")).encode("ascii")
    return text.replace(_NO_DIGEST, b'"digest":"' + hashlib.sha256(text).hexdigest().encode() + b'"', 1)


def decode(text: bytes, source: str) -> Manifest:
    """Reads a manifest back.

    Args:
        text: the file's content.
        source: where it came from, for messages.

    Raises:
        CheckpointError: the text is damaged, of a newer version, or says something impossible.
    """
    digest = _DIGEST_FIELD.search(text, 0, 128)
    if digest is None:
        raise CheckpointError(f"{source} is not an nxd-ckpt manifest, or its beginning is damaged")
    if hashlib.sha256(_DIGEST_FIELD.sub(_NO_DIGEST, text, count=1)).hexdigest().encode() != digest[1]:
        raise CheckpointError(f"{source} is damaged: its content does not match its digest; use another checkpoint")
    try:
        content = json.loads(text)
        _expect(content["format"] == FORMAT, f"format {content['format']!r}, expected {FORMAT!r}")
        _expect(
            content["version"] == FORMAT_VERSION,
            f"format version {content['version']!r}, but this nxd-ckpt reads {FORMAT_VERSION}; upgrade nxd-ckpt",
        )
        return _manifest_from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{source} cannot be used: {type(error).__name__}: {error}") from error


def _tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    chunks = [
        {
            "file": chunk.file,
            "key": chunk.key,
            "offset": chunk.offset,
            "bytes": chunk.num_bytes,
            "box": [chunk.box.offsets, chunk.box.shape],
        }
        for chunk in entry.chunks
    ]
    return {"dtype": entry.dtype, "shape": entry.global_shape, "chunks": chunks}


def _manifest_from_json(content: dict[str, Any]) -> Manifest:
    save_id, step = content["save_id"], content["step"]
    _expect(isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id) is not None, f"save_id {save_id!r}")
    _expect(step is None or _is_size(step), f"step {step!r}")
    files: dict[str, int] = content["files"]
    for name, size in files.items():
        _expect(is_data_file_name(name), f"data file name {name!r}")
        _expect(_is_size(size), f"size {size!r} of {name}")
    return Manifest(
        save_id=save_id,
        step=step,
        committed_at=float(content["committed_at"]),
        world_size=int(content["world_size"]),
        files=files,
        tensors={name: _tensor_from_json(name, entry, files) for name, entry in content["tensors"].items()},
        objects=content["objects"],
        rank_objects={int(rank): value for rank, value in content["rank_objects"].items()},
    )


def _tensor_from_json(name: str, entry: dict[str, Any], files: Mapping[str, int]) -> TensorEntry:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    _expect(dtype in DTYPE_OF_CODE, f"dtype {dtype!r} of {name!r}")
    _expect(all(map(_is_size, shape)), f"shape {shape} of {name!r}")
    itemsize = DTYPE_OF_CODE[dtype].itemsize
    chunks = []
    for item in entry["chunks"]:
        offsets, sizes = map(tuple, item["box"])
        chunk = Chunk(item["file"], item["key"], item["offset"], item["bytes"], Box(offsets, sizes))
        possible = (
            all(map(_is_size, (*offsets, *sizes, chunk.offset)))
            and len(offsets) == len(sizes)
            and chunk.box.fits_in(shape)
            and chunk.num_bytes == math.prod(sizes) * itemsize
            and chunk.offset + chunk.num_bytes <= files.get(chunk.file, -1)
        )
        _expect(possible, f"chunk {item} of {name!r} with shape {list(shape)}")
        chunks.append(chunk)
    return TensorEntry(dtype, shape, tuple(chunks))


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _expect(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(f"it has {found}")
