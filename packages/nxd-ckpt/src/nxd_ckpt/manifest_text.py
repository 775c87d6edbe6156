"""The text of a manifest: written as JSON, and read back with every field checked, since it may be untrusted."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from operator import add, le
from typing import Any

from nxd_ckpt.arguments import is_tag
from nxd_ckpt.boxes import Box, gc_paused
from nxd_ckpt.checksums import num_blocks
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import (
    ITEM_SIZES,
    MAX_MANIFEST_BYTES,
    Chunk,
    ExtraEntry,
    HeaderEntry,
    Manifest,
    ManifestHead,
    TensorEntry,
    is_extra_name,
    is_file_name,
    is_possible_shape,
    metrics_of,
)
from nxd_ckpt.objects import check_json

FORMAT = "nxd-ckpt"
# A checkpoint that references files of others has version 3, which older readers refuse; all others have version 2.
VERSION_ALONE, VERSION_WITH_REFERENCES = 2, 3
MAX_DIMS = 64

_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
_HASH = re.compile(r"[0-9a-f]{16}")
_XXH128 = re.compile(r"[0-9a-f]{32}")
_DIGEST_FIELD = re.compile(rb'"digest":"([0-9a-f]{64})"')
_NO_DIGEST = b'"digest":"' + b"0" * 64 + b'"'
_HEAD_DIGEST_FIELD = re.compile(rb'"head_digest":"([0-9a-f]{64})"')
_NO_HEAD_DIGEST = b'"head_digest":"' + b"0" * 64 + b'"'


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
    """Read the first line of a manifest.

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
        return _head_from_json(content, metrics_of(content))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def check_digest(text: bytes, source: str) -> None:
    """Compare a whole manifest with its digest.

    Raises:
        CheckpointError: it does not match.
    """
    digest = _DIGEST_FIELD.search(text, 0, 128)
    if digest is None:
        raise CheckpointError(f"{source} is not an nxd-ckpt manifest, or its beginning is damaged")
    hashed = hashlib.sha256(text[: digest.start()] + _NO_DIGEST)
    hashed.update(memoryview(text)[digest.end() :])
    if hashed.hexdigest().encode() != digest[1]:
        raise CheckpointError(f"{source} is damaged: its content does not match its digest")


def decode(text: bytes, source: str) -> Manifest:
    """Read a manifest back.

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
    possible = is_extra_name(name) and extra.file in files and _are_hashes(extra.hashes, files[extra.file])
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
