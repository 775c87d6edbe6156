"""Reads (with every field checked) and writes the header of a safetensors file.

The format: an 8-byte little-endian length, that many bytes of JSON, then the elements of all tensors without gaps.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.dtypes import CODE_OF_DTYPE, DTYPE_OF_CODE, in_safetensors
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import regular_file
from nxd_ckpt.manifest_text import without_repeats
from nxd_ckpt.objects import is_unicode
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.safetensors_file import as_header

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
