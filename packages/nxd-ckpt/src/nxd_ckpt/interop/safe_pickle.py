"""Reads files that torch pickled without running code from them, unless they are trusted.

torch's restricted unpickler knows tensors, numbers, strings and containers; a format may add a few plain classes.
Anything else that a file asks for is refused before it is called. The number of values and elements is compared with
the file's size, since later code iterates over all of them.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import torch

from nxd_ckpt.errors import CheckpointError, one_line
from nxd_ckpt.objects import MAX_NESTING

Extra = tuple[Callable[..., Any] | type, str]
"""A class and the full name under which a file may ask for it."""

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
_MOST_REPEATED_BYTES = 1 << 24  # bytes of elements that share memory, as after `expand`
_MOST_TIMES_SHARED = 64  # how often tensors may share the file's bytes, as tied ones do
_MOST_VALUES_PER_BYTE, _LEAST_MOST_VALUES = 4, 1 << 20


def load_torch_file(path: str, extra: Sequence[Extra] = ()) -> Any:
    """Load a file written by `torch.save`; tensors are views of the mapped file if its format allows (torch 1.6+).

    Raises:
        CheckpointError: the file is missing, damaged, or asks for something that is not allowed.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is missing")
    return _load(path, path, extra, mmap=_is_zip(path))


def load_trusted_torch_file(path: str) -> Any:
    """Load a file written by `torch.save` without restrictions: the file can run any code.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling runs foreign code
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error


def load_torch_stream(stream: IO[bytes], what: str, extra: Sequence[Extra] = ()) -> Any:
    """Load an open file into memory, like `load_torch_file`; `what` names it in messages."""
    return _load(stream, what, extra, mmap=False)


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _load(file: "str | IO[bytes]", what: str, extra: Sequence[Extra], *, mmap: bool) -> Any:
    num_bytes = _checked_size(file, what)
    try:
        with torch.serialization.safe_globals(list(extra)):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{what} {_reason(str(error))}") from error
    except Exception as error:  # a damaged file makes torch's reader fail in any way
        raise CheckpointError(f"{what} cannot be read: {one_line(error)}") from error
    _Claims(what, num_bytes).check(content)
    return content


def _checked_size(file: "str | IO[bytes]", what: str) -> int:
    """Return the size of a file; raise CheckpointError if it is an archive that would unpack to more bytes.

    torch compresses nothing, and its archive entries do not share bytes.
    """
    if isinstance(file, str):
        num_bytes = os.path.getsize(file)
    else:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except Exception:  # not an archive (torch before 1.6), or a damaged one, for which torch gives a better error
        entries = []
    finally:
        if not isinstance(file, str):
            file.seek(0)
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > num_bytes or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(
            f"{what} has {num_bytes} bytes and would unpack to {unpacked}: torch.save compresses nothing, so it did "
            "not write this file; save it again"
        )
    return num_bytes


class _Size(NamedTuple):
    """The cost of iterating over a value: the number of values in it, and the bytes of its tensors."""

    values: int = 0
    tensor_bytes: int = 0


class _Claims:
    """Compares the values read from a file with the file's size."""

    def __init__(self, what: str, num_bytes: int) -> None:
        self._what, self._num_bytes = what, num_bytes
        self._sizes: dict[int, _Size] = {}  # sizes of containers by identity, since one can appear in many places

    def check(self, content: Any) -> None:
        """Raise CheckpointError if the values or tensor elements far exceed the file's bytes."""
        size = self._size(content, 0)
        if size.values > max(_LEAST_MOST_VALUES, _MOST_VALUES_PER_BYTE * self._num_bytes):
            raise CheckpointError(
                f"{self._what} has {self._num_bytes} bytes but holds {size.values} values by repeating the same ones; "
                "it is not a checkpoint"
            )
        if size.tensor_bytes > _MOST_REPEATED_BYTES + _MOST_TIMES_SHARED * self._num_bytes:
            raise CheckpointError(
                f"{self._what} has {self._num_bytes} bytes but holds tensors of {size.tensor_bytes} bytes that share "
                "the same memory; save contiguous tensors"
            )

    def _size(self, value: Any, nesting: int) -> _Size:
        if isinstance(value, torch.Tensor):
            return _Size(1, self._tensor_bytes(value))
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return _Size(1)
        if nesting > MAX_NESTING:  # or it holds itself
            raise CheckpointError(f"{self._what} holds containers that are nested more than {MAX_NESTING} deep")
        if id(value) not in self._sizes:
            held = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
            sizes = [_Size(1), *(self._size(one, nesting + 1) for one in held)]
            self._sizes[id(value)] = _Size(*map(sum, zip(*sizes, strict=True)))
        return self._sizes[id(value)]

    def _tensor_bytes(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided or tensor.is_meta:  # has no such memory; its readers refuse it
            return 0
        claimed, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if claimed > stored + _MOST_REPEATED_BYTES:
            raise CheckpointError(
                f"{self._what} holds a tensor {list(tensor.shape)} of {claimed} bytes in {stored} bytes of memory; "
                "save a contiguous one"
            )
        return claimed


def _reason(message: str) -> str:
    refused = _REFUSED.search(message)
    if refused:
        return f"asks for {refused[1]}, which could run code, and is refused; none of its code was run"
    return "holds pickled objects that are refused, or is damaged; none of its code was run"
