"""A small model of many types, a reducer that gives itself away, and what a process holds in memory of its own."""

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE

Tensors = Mapping[str, torch.Tensor]

M_MMAP_THRESHOLD = -3  # of malloc.h


@pytest.fixture(scope="session")
def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of every type that safetensors files have, of random bits, and shapes from 0-d to empty."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in CODE_OF_DTYPE.keys() - {torch.complex128}:
        content = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 5 * dtype.itemsize), generator=generator)
        tensors[str(dtype)] = content.to(torch.uint8).view(dtype)
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12.0).reshape(3, 4).T,
    }


class _Reducer:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._file}",)


@pytest.fixture
def bomb(tmp_path: Path) -> Any:
    """An object whose unpickling makes the file `exploded` in the test's folder."""
    return _Reducer(tmp_path / "exploded")


@pytest.fixture
def exploded(tmp_path: Path) -> Callable[[], bool]:
    """Whether the bomb went off."""
    return (tmp_path / "exploded").exists


@pytest.fixture(scope="session")
def own_memory() -> Callable[[], int]:
    """Bytes of this process that are no pages of files; those of tensors go back to the system once they are freed.

    By itself glibc keeps large blocks, up to 32 MiB each, once one of their size has been freed.
    """
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)

    def read() -> int:
        return 1024 * int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])

    return read
