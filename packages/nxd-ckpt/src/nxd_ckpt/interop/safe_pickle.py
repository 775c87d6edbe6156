"""Reading files that torch pickled, without running code from them unless they are trusted.

torch's restricted unpickler knows tensors, numbers, strings and containers; a format may add a few plain classes of
its own. Anything else that a file asks for is refused before it is called.
"""

import os
import pickle
import re
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch

from nxd_ckpt.errors import CheckpointError

Extra = tuple[Callable[..., Any] | type, str]
"""A class and the full name under which a file may ask for it."""

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def load_torch_file(path: str, extra: Sequence[Extra] = ()) -> Any:
    """What `torch.save` wrote; tensors are views of the mapped file where its format allows (torch 1.6 and later).

    Raises:
        CheckpointError: the file is missing, damaged, or asks for something that is not allowed.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is missing")
    return _load(path, path, extra, mmap=_is_zip(path))


def load_trusted_torch_file(path: str) -> Any:
    """What `torch.save` wrote, without restrictions: the file can run any code.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling runs foreign code
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def load_torch_stream(stream: IO[bytes], what: str, extra: Sequence[Extra] = ()) -> Any:
    """As `load_torch_file`, from an open file into memory; `what` names it in messages."""
    return _load(stream, what, extra, mmap=False)


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _load(file: "str | IO[bytes]", what: str, extra: Sequence[Extra], *, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals(list(extra)):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{what} {_reason(str(error))}") from error
    except Exception as error:  # a damaged file makes torch's reader fail in any way
        raise CheckpointError(f"{what} cannot be read: {_first_line(error)}") from error


def _reason(message: str) -> str:
    refused = _REFUSED.search(message)
    if refused:
        return f"asks for {refused[1]}, which could run code, and is refused; nothing of it was run"
    return "holds pickled objects that are refused, or is damaged; nothing of it was run"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no further detail'}"
