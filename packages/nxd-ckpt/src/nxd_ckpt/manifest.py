"""The manifest: a checkpoint's contents and their locations. A folder with a complete manifest is a checkpoint.

This module writes it as JSON text and reads it back with every field checked, since a manifest may be untrusted.
FORMAT.md specifies the format. `plan.py` assigns boxes to files.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, le
from typing import Any, NamedTuple

from nxd_ckpt.boxes import Box
from nxd_ckpt.checksums import num_blocks
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.gc_pause import gc_paused
from nxd_ckpt.objects import check_json
from nxd_ckpt.tags import is_tag

FORMAT = "nxd-ckpt"
# A checkpoint that references files of others has version 3, which older readers refuse; all others have version 2.
VERSION_ALONE, VERSION_WITH_REFERENCES = 2, 3
MANIFEST_NAME = "manifest.json"
FILE_FOLDERS = ("data", "extra")
MAX_MANIFEST_BYTES = 2**30
MAX_DIMS = 64

# Bytes per element of each tensor type, by safetensors name. Here, as the writer process has no torch.
_TYPES_BY_SIZE = {
    1: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0 F4",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
    16: "C128",
}
ITEM_SIZES = {code: size for size, codes in _TYPES_BY_SIZE.items() for code in codes.split()}

_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_EXTRA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_FILE = re.compile(
    r"data/[0-9a-f]{32}-[0-9]{5,9}-[0-9]{1,9}\.safetensors|" rf"extra/[0-9a-f]{{32}}-{_EXTRA_NAME.pattern}"
)
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
_HASH = re.compile(r"[0-9a-f]{16}")
_XXH128 = re.compile(r"[0-9a-f]{32}")
_FILE_ANYWHERE = re.compile(_FILE.pattern.encode())
_DIGEST_FIELD = re.compile(rb'"digest":"([0-9a-f]{64})"')
_NO_DIGEST = b'"digest":"' + b"0" * 64 + b'"'
_HEAD_DIGEST_FIELD = re.compile(rb'"head_digest":"([0-9a-f]{64})"')
_NO_HEAD_DIGEST = b'"head_digest":"' + b"0" * 64 + b'"'


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
            metrics=_metrics_of(self.objects),
        )


def data_file_name(save_id: str, writer: int, number: int = 0) -> str:
    """Relative path of one writer's data file, unique to this save."""
    return f"data/{save_id}-{writer:05d}-{number}.safetensors"


def extra_file_name(save_id: str, name: str) -> str:
    """Relative path of a user's file, unique to this save.

    Raises:
        ValueError: the name is not allowed.
    """
    if not isinstance(name, str) or _EXTRA_NAME.fullmatch(name) is None:
        raise ValueError(
            f"the name {name!r} of an extra file is not allowed: use 1 to 100 letters, digits, _ . or - (. and - not "
            "first)"
        )
    return f"extra/{save_id}-{name}"


def is_file_name(path: str) -> bool:
    """Whether this package could have written a file with this relative path."""
    return _FILE.fullmatch(path) is not None


def file_names_in(text: bytes) -> set[str]:
    """Return all such paths in a text, such as a manifest, even if it is damaged."""
    return {match[0].decode() for match in _FILE_ANYWHERE.finditer(text)}


def is_possible_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Whether torch can create a tensor of this shape, even if empty: its bytes and strides fit into 63 bits."""
    return math.prod(size or 1 for size in shape) * itemsize < 2**63


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as JSON text in two lines: the head for `decode_head`, and everything else.

    Its digest is the sha256 of that text with the digest's digits all zero. The first line has its own digest.

    Raises:
        CheckpointError: it is larger than the limit for manifests.
    """
    content = {
        "mesh": manifest.mesh,
        "objects": manifest.objects,
        "rank_objects": {str(rank): value for rank, value in manifest.rank_objects.items()},
        "headers": {
            file: {"bytes": header.num_bytes, "xxh3": header.hashes} for file, header in manifest.headers.items()
        },
        "extra": {name: {"file": entry.file, "xxh3": entry.hashes} for name, entry in manifest.extra.items()},
        "tensors": {name: _tensor_to_json(entry) for name, entry in manifest.tensors.items()},
    }
    rest = _as_json(content)[1:]
    text = _first_line(manifest.head, len(rest)) + rest
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest has {len(text)} bytes, the limit is {MAX_MANIFEST_BYTES}; pass large objects as extra files"
        )
    return text.replace(_NO_DIGEST, b'"digest":"' + hashlib.sha256(text).hexdigest().encode() + b'"', 1)


def _first_line(head: ManifestHead, num_bytes_after: int) -> bytes:
    """Encode the first line, with its digest, and zeros in place of the digest of the whole text."""
    content = {
        "digest": "0" * 64,
        "format": FORMAT,
        "version": VERSION_WITH_REFERENCES if head.references else VERSION_ALONE,
        "head_digest": "0" * 64,
        "bytes_after_head": num_bytes_after,
        "save_id": head.save_id,
        "step": head.step,
        "committed_at": head.committed_at,
        "world_size": head.world_size,
        "metrics": head.metrics,
        "files": dict(head.files),
    }
    if head.references:
        content["references"] = dict(head.references)
    line = _as_json(content)[:-1] + b",\n"
    digest = hashlib.sha256(line).hexdigest().encode()
    return line.replace(_NO_HEAD_DIGEST, b'"head_digest":"' + digest + b'"', 1)


def _as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def decode_head(text: bytes, num_bytes: int | None) -> ManifestHead | None:
    """Reads the first line of a manifest.

    Args:
        text: the beginning of the file.
        num_bytes: the size of the file, None if unknown.

    Returns:
        None if the text is not enough: the line is longer, the manifest is from an older version without such a line,
        or it is damaged. `decode` distinguishes these.
    """
    line, _, _ = text.partition(b"\n")
    digest = _HEAD_DIGEST_FIELD.search(line, 0, 256)
    if digest is None or len(line) == len(text):
        return None
    blank = _HEAD_DIGEST_FIELD.sub(_NO_HEAD_DIGEST, _DIGEST_FIELD.sub(_NO_DIGEST, line, count=1), count=1) + b"\n"
    if hashlib.sha256(blank).hexdigest().encode() != digest[1]:
        return None
    try:
        content = json.loads(line.removesuffix(b",") + b"}", object_pairs_hook=without_repeats)
        _check_version(content)
        if num_bytes not in (None, len(line) + 1 + content["bytes_after_head"]):
            return None
        return _head_from_json(content, _metrics_of(content))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def check_digest(text: bytes, source: str) -> None:
    """Compares a whole manifest with its digest.

    Raises:
        CheckpointError: it does not match.
    """
    digest = _DIGEST_FIELD.search(text, 0, 128)
    if digest is None:
        raise CheckpointError(f"{source} is not an nxd-ckpt manifest, or its beginning is damaged")
    hashed = hashlib.sha256(text[: digest.start()] + _NO_DIGEST)
    hashed.update(memoryview(text)[digest.end() :])
    if hashed.hexdigest().encode() != digest[1]:
        raise CheckpointError(f"{source} is damaged: its content does not match its digest; use another checkpoint")


def decode(text: bytes, source: str) -> Manifest:
    """Reads a manifest back.

    Args:
        text: the file's content.
        source: where it came from, for messages.

    Raises:
        CheckpointError: the text is damaged, has another version, or has invalid fields.
    """
    check_digest(text, source)
    try:
        with gc_paused():
            content = json.loads(text, object_pairs_hook=without_repeats)
        _check_version(content)
        with gc_paused():
            return _manifest_from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{source} cannot be used: {type(error).__name__}: {error}") from error


def _tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    chunks = [
        {
            "file": chunk.file,
            "offset": chunk.offset,
            "bytes": chunk.num_bytes,
            "box": [chunk.box.offsets, chunk.box.shape],
            "xxh3": chunk.hashes,
            **({"xxh128": chunk.xxh128} if chunk.xxh128 else {}),
        }
        for chunk in entry.chunks
    ]
    return {"dtype": entry.dtype, "shape": entry.global_shape, "chunks": chunks}


def _check_version(content: dict[str, Any]) -> None:
    _expect(content["format"] == FORMAT, f"format {content['format']!r}, expected {FORMAT!r}")
    _expect(
        content["version"] in (VERSION_ALONE, VERSION_WITH_REFERENCES),
        f"format version {content['version']!r}, but this nxd-ckpt reads {VERSION_ALONE} and "
        f"{VERSION_WITH_REFERENCES}; upgrade nxd-ckpt",
    )


def _head_from_json(content: dict[str, Any], metrics: Mapping[str, float]) -> ManifestHead:
    save_id, step, committed_at = content["save_id"], content["step"], content["committed_at"]
    _expect(isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id) is not None, f"save_id {save_id!r}")
    _expect(step is None or _is_size(step), f"step {step!r}")
    _expect(type(committed_at) in (int, float) and abs(committed_at) < 2**63, f"committed_at {committed_at!r}")
    _expect(_is_size(content["world_size"]), f"world_size {content['world_size']!r}")
    files: dict[str, int] = content["files"]
    for name, size in files.items():
        _expect(is_file_name(name), f"data file name {name!r}")
        _expect(_is_size(size), f"size {size!r} of {name}")
    return ManifestHead(
        save_id=save_id,
        step=step,
        committed_at=float(committed_at),
        world_size=content["world_size"],
        files=files,
        references=_references_from_json(content, files),
        metrics=metrics,
    )


def _manifest_from_json(content: dict[str, Any]) -> Manifest:
    head = _head_from_json(content, {})
    files, all_bytes = head.files, sum(head.files.values())
    for name in ("mesh", "objects"):
        check_json(content[name], name)
    for rank, value in content["rank_objects"].items():
        _expect(_RANK.fullmatch(rank) is not None, f"rank_objects of rank {rank!r}")
        check_json(value, f"rank_objects[{rank}]")
    return Manifest(
        save_id=head.save_id,
        step=head.step,
        committed_at=head.committed_at,
        world_size=head.world_size,
        mesh=content["mesh"],
        files=files,
        tensors={name: _tensor_from_json(name, entry, files, all_bytes) for name, entry in content["tensors"].items()},
        extra={name: _extra_from_json(name, entry, files) for name, entry in content["extra"].items()},
        objects=content["objects"],
        rank_objects={int(rank): value for rank, value in content["rank_objects"].items()},
        headers={file: _header_from_json(file, entry, files) for file, entry in content.get("headers", {}).items()},
        references=head.references,
    )


def _metrics_of(objects: Any) -> dict[str, float]:
    metrics = objects.get("metrics") if isinstance(objects, dict) else None
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return {
        name: value for name, value in numbers if type(value) is float or (type(value) is int and abs(value) < 2**53)
    }


def _tensor_from_json(name: str, entry: dict[str, Any], files: Mapping[str, int], all_bytes: int) -> TensorEntry:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    _expect(dtype in ITEM_SIZES, f"dtype {dtype!r} of {name!r}")
    _expect(len(shape) <= MAX_DIMS and all(map(_is_size, shape)), f"shape {shape} of {name!r}")
    itemsize = ITEM_SIZES[dtype]
    _expect(is_possible_shape(shape, itemsize), f"shape {list(shape)} of {name!r}, which is too large")
    num_bytes = math.prod(shape) * itemsize
    _expect(num_bytes <= all_bytes, f"shape {list(shape)} of {name!r}, {num_bytes} bytes, with files of {all_bytes}")
    chunks = []
    for item in entry["chunks"]:
        offsets, sizes = map(tuple, item["box"])
        file, offset, num_bytes, hashes = item["file"], item["offset"], item["bytes"], tuple(item["xxh3"])
        xxh128 = item.get("xxh128", "")
        possible = (
            all(map(_is_size, (offset, *offsets, *sizes)))
            and len(offsets) == len(sizes) == len(shape)
            and all(map(le, map(add, offsets, sizes), shape))
            and num_bytes == math.prod(sizes) * itemsize
            and offset + num_bytes <= files.get(file, -1)
            and _are_hashes(hashes, num_bytes)
            and (xxh128 == "" or _XXH128.fullmatch(xxh128))
        )
        if not possible:  # not `_expect`, as formatting the text each time would dominate the cost
            raise ValueError(f"it has chunk {item} of {name!r} with shape {list(shape)}")
        chunks.append(Chunk(file, offset, num_bytes, Box(offsets, sizes), hashes, xxh128))
    return TensorEntry(dtype, shape, tuple(chunks))


def _references_from_json(content: dict[str, Any], files: Mapping[str, int]) -> dict[str, str]:
    """Read the references, which only version 3 has, so that no reader of version 2 can miss them."""
    references: dict[str, str] = content["references"] if content["version"] == VERSION_WITH_REFERENCES else {}
    for file, tag in references.items():
        possible = file in files and file.startswith("data/") and is_tag(tag)
        _expect(possible, f"a reference to {file!r} of checkpoint {tag!r}")
    return references


def _extra_from_json(name: str, entry: dict[str, Any], files: Mapping[str, int]) -> ExtraEntry:
    extra = ExtraEntry(entry["file"], tuple(entry["xxh3"]))
    possible = _EXTRA_NAME.fullmatch(name) and extra.file in files and _are_hashes(extra.hashes, files[extra.file])
    _expect(bool(possible), f"extra file {name!r}: {entry}")
    return extra


def _header_from_json(file: str, entry: dict[str, Any], files: Mapping[str, int]) -> HeaderEntry:
    header = HeaderEntry(entry["bytes"], tuple(entry["xxh3"]))
    possible = (
        _is_size(header.num_bytes)
        and header.num_bytes <= files.get(file, -1)
        and _are_hashes(header.hashes, header.num_bytes)
    )
    _expect(possible, f"header of {file!r}: {entry}")
    return header


def _are_hashes(hashes: Sequence[object], num_bytes: int) -> bool:
    return len(hashes) == num_blocks(num_bytes) and all(map(_is_hash, hashes))


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, refusing repeated keys: readers do not agree on which of two values counts."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has a key more than once: {next(key for key in keys if keys.count(key) > 1)!r}")
    return content


def _expect(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(f"it has {found}")
