"""The manifest: a checkpoint's contents and their locations. A folder with a complete manifest is a checkpoint.

`manifest_text.py` writes and reads it as JSON text, `plan.py` assigns boxes to files, and
docs/reference/checkpoint-format.md specifies the format.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nxd_ckpt.boxes import Box

MANIFEST_NAME = "manifest.json"
FILE_FOLDERS = ("data", "extra")
MAX_MANIFEST_BYTES = 2**30

# Bytes per element of each tensor type, by safetensors name. Here, as the writer process has no torch.
_TYPES_BY_SIZE = {
    1: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0 F4",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
    16: "C128",
}
ITEM_SIZES = {code: size for size, codes in _TYPES_BY_SIZE.items() for code in codes.split()}

_EXTRA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_FILE = re.compile(
    r"data/[0-9a-f]{32}-[0-9]{5,9}-[0-9]{1,9}\.safetensors|" rf"extra/[0-9a-f]{{32}}-{_EXTRA_NAME.pattern}"
)
_FILE_ANYWHERE = re.compile(_FILE.pattern.encode())


class Chunk(NamedTuple):
    """One stored box: `num_bytes` bytes of `file` starting at `offset`, row-major.

    `hashes` has one hash per block of 16 MiB, the last block may be shorter; see `checksums.py`. `xxh128` is the hash
    of all bytes, by which a later save can recognize them; empty unless the save was incremental.
    """

    file: str
    offset: int
    num_bytes: int
    box: Box
    hashes: tuple[str, ...]
    xxh128: str = ""


class TensorEntry(NamedTuple):
    """One logical tensor; `dtype` is the safetensors name, such as "BF16"."""

    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class ExtraEntry(NamedTuple):
    """A user's file: its path, and the hashes of its blocks as for a chunk."""

    file: str
    hashes: tuple[str, ...]


class HeaderEntry(NamedTuple):
    """The header of a data file, before its first chunk: its size, and the hashes of its blocks."""

    num_bytes: int
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """The contents of a manifest's first line: enough to order, keep and delete a checkpoint.

    The attributes are those of `Manifest`; `metrics` are the numbers in `objects["metrics"]`, by name.
    """

    save_id: str
    step: int | None
    committed_at: float
    world_size: int
    files: Mapping[str, int]
    references: Mapping[str, str]
    metrics: Mapping[str, float]

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key from old to new; checkpoints without a step come before those with one."""
        return (-1 if self.step is None else self.step, self.committed_at, self.save_id)

    @property
    def own_files(self) -> dict[str, int]:
        """The files that are stored with this checkpoint."""
        return {file: size for file, size in self.files.items() if file not in self.references}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The complete description of one checkpoint.

    `files` gives the size in bytes of each file, `headers` the header of each data file, by relative path. Checkpoints
    of earlier versions of this package have no `headers`. `references` gives the tag of the checkpoint in the same root
    that stores a file, for files stored with another checkpoint.
    """

    save_id: str
    step: int | None
    committed_at: float
    world_size: int
    mesh: Any
    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    extra: Mapping[str, ExtraEntry]
    objects: Any
    rank_objects: Mapping[int, Any]
    headers: Mapping[str, HeaderEntry]
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> ManifestHead:
        """The part in the first line."""
        return ManifestHead(
            save_id=self.save_id,
            step=self.step,
            committed_at=self.committed_at,
            world_size=self.world_size,
            files=self.files,
            references=self.references,
            metrics=metrics_of(self.objects),
        )


def data_file_name(save_id: str, writer: int, number: int = 0) -> str:
    """Relative path of one writer's data file, unique to this save."""
    return f"data/{save_id}-{writer:05d}-{number}.safetensors"


def extra_file_name(save_id: str, name: str) -> str:
    """Relative path of a user's file, unique to this save.

    Raises:
        ValueError: the name is not allowed.
    """
    if not isinstance(name, str) or not is_extra_name(name):
        raise ValueError(
            f"the name {name!r} of an extra file is not allowed: use 1 to 100 letters, digits, _ . or - (. and - not "
            "first)"
        )
    return f"extra/{save_id}-{name}"


def is_extra_name(name: str) -> bool:
    """Whether a user's file can have this name."""
    return _EXTRA_NAME.fullmatch(name) is not None


def is_file_name(path: str) -> bool:
    """Whether this package could have written a file with this relative path."""
    return _FILE.fullmatch(path) is not None


def file_names_in(text: bytes) -> set[str]:
    """Return all such paths in a text, such as a manifest, even if it is damaged."""
    return {match[0].decode() for match in _FILE_ANYWHERE.finditer(text)}


def is_possible_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Whether torch can create a tensor of this shape, even if empty: its bytes and strides fit into 63 bits."""
    return math.prod(size or 1 for size in shape) * itemsize < 2**63


def metrics_of(objects: Any) -> dict[str, float]:
    """Return the numbers in `objects["metrics"]`, by name."""
    metrics = objects.get("metrics") if isinstance(objects, dict) else None
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return {
        name: value for name, value in numbers if type(value) is float or (type(value) is int and abs(value) < 2**53)
    }
