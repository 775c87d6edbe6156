"""Writes a Hugging Face folder with one tensor in memory at a time."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from nxd_ckpt.files import make_folders, new_file, sync_folder, write_fully
from nxd_ckpt.interop.huggingface.reading import INDEX_FILE, SINGLE_FILE, make_header
from nxd_ckpt.interop.source import Progress, TensorSource, converted, ignore_progress, num_bytes, read_whole
from nxd_ckpt.reader import TensorInfo

_UNFINISHED = ".unfinished"
_LEFTOVER = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?\.unfinished")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_METADATA = {"format": "pt"}  # transformers refuses files that do not say so


def write_hugging_face(
    source: TensorSource,
    folder: "str | os.PathLike[str]",
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    progress: Progress = ignore_progress,
) -> list[str]:
    """Write all tensors of a source in the format that `transformers` and `safetensors` read.

    Memory: the largest tensor. Files end in ".unfinished" until all are written, and are then renamed, the index last.
    A failed call removes its unfinished files; those of a killed process are removed by the next call.

    Args:
        source: the tensors to write; names are kept.
        folder: the folder to write to; created if missing.
        dtype: dtype to convert floating-point tensors to; default: as stored.
        max_shard_size: maximum bytes of tensors in one file, such as "5GB" or "500MiB"; a larger tensor gets its own
            file.
        progress: function called after each tensor is written.

    Returns:
        The names of the files written, the index last.

    Raises:
        ValueError: the folder already holds a model or part of one, or `max_shard_size` is not a size.
        CheckpointError: the source cannot be read.
    """
    path = os.path.abspath(folder)
    limit = parse_size(max_shard_size)
    infos = {name: TensorInfo(converted(info.dtype, dtype), info.global_shape) for name, info in source.tensors.items()}
    parts = _share_out(infos, limit)
    files = _file_names(len(parts))
    for taken in dict.fromkeys((SINGLE_FILE, INDEX_FILE, *files)):
        if os.path.lexists(os.path.join(path, taken)):
            raise ValueError(f"{path} already holds a {taken}; remove it or choose another folder")
    headers = [make_header(part, _METADATA) for part in parts]
    make_folders(path)
    with _unfinished_files_removed(path):
        for file, header, part in zip(files, headers, parts, strict=True):
            with new_file(os.path.join(path, file + _UNFINISHED)) as fd:
                _write_tensors(fd, header, source, part, progress)
        if len(files) > 1:
            weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
            total = sum(num_bytes(info) for info in infos.values())
            files.append(INDEX_FILE)
            with new_file(os.path.join(path, INDEX_FILE + _UNFINISHED)) as fd:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                write_fully(fd, json.dumps(index, indent=2).encode() + b"\n")
        for file in files:
            os.replace(os.path.join(path, file + _UNFINISHED), os.path.join(path, file))
    sync_folder(path)
    return files


def parse_size(size: int | str) -> int:
    """Return the bytes of a number or a string such as "5GB" (10**9) or "500MiB" (2**20).

    Raises:
        ValueError: it is not a size above 0.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise ValueError(f"{size!r} is not a size; expected a number and a unit, such as 500MB or 5GiB")
        power = " KMGT".index(match[2].upper() or " ")
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size < 1:
        raise ValueError(f"{size} bytes is too small; use 1 byte or more, such as '5GB'")
    return size


def _share_out(infos: Mapping[str, TensorInfo], limit: int) -> list[dict[str, TensorInfo]]:
    """Assign tensors to files in order; within a file, large element sizes come first, so that all are aligned."""
    parts: list[dict[str, TensorInfo]] = [{}]
    used = 0
    for name, info in infos.items():
        size = num_bytes(info)
        if parts[-1] and used + size > limit:
            parts.append({})
            used = 0
        parts[-1][name] = info
        used += size
    return [dict(sorted(part.items(), key=lambda item: -item[1].dtype.itemsize)) for part in parts]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_tensors(
    fd: int, header: bytes, source: TensorSource, infos: Mapping[str, TensorInfo], progress: Progress
) -> None:
    write_fully(fd, header)
    for name, info in infos.items():
        whole = read_whole(source, name, info.dtype)
        write_fully(fd, memoryview(whole.reshape(-1).view(torch.uint8).numpy().data))
        progress(name, num_bytes(info))


@contextmanager
def _unfinished_files_removed(folder: str) -> Iterator[None]:
    """Remove unfinished files of an earlier attempt now, and those of this one if it fails."""
    _remove_unfinished(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the original error matters more
            _remove_unfinished(folder)
        raise


def _remove_unfinished(folder: str) -> None:
    for name in os.listdir(folder):
        if _LEFTOVER.fullmatch(name):
            os.unlink(os.path.join(folder, name))
