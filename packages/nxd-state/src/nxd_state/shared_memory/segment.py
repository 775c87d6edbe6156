"""A piece of memory that one process makes and others map: nameless from the start, so that nothing can be left over.

It is a memfd: no file anywhere, no limit by the size of /dev/shm, pages taken only when first written. Others open
it through /proc while its maker keeps the descriptor; after that the mappings alone keep it alive.
"""

import ctypes
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from nxd_state.standard_streams import hold_standard_streams

_WORD = 8
_TOKEN_AT = 0  # byte offset; the rest of the first cache line is free
FIRST_FREE_BYTE = 64


@dataclass(frozen=True)
class Handle:
    """The data that another process of the host needs to map a segment."""

    pid: int
    descriptor: int
    size: int
    token: int

    def to_json(self) -> list[int]:
        """As plain numbers."""
        return [self.pid, self.descriptor, self.size, self.token]


# Not by Python's mmap: it would keep a copy of the descriptor open.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = 2**64 - 1


def _map(descriptor: int, size: int) -> int:
    address: int = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size} bytes of shared memory: {os.strerror(error)}")
    return address


def _unmap(address: int, size: int) -> None:
    _libc.munmap(address, size)


class Segment:
    """A mapping, zero at first.

    Attributes:
        words: the memory as 64-bit unsigned integers; each is read and written whole.
        address: where it begins in this process.
        size: bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.address = _map(descriptor, size)
        self.words = (ctypes.c_uint64 * (size // _WORD)).from_address(self.address)
        # Tensors in this memory keep the array, not the segment.
        weakref.finalize(self.words, _unmap, self.address, size).atexit = False
        # Not as an inference tensor, even if it is mapped in inference mode: others could not be written to later.
        with torch.inference_mode(False):
            self._bytes: torch.Tensor = torch.frombuffer(self.words, dtype=torch.uint8)

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """The bytes from `offset` on, as a uint8 tensor `[size]` in this memory."""
        with torch.inference_mode(False):
            return self._bytes[offset : offset + size]

    def write_text(self, offset: int, text: bytes) -> None:
        """Write bytes at an offset."""
        ctypes.memmove(self.address + offset, text, len(text))

    def read_text(self, offset: int, size: int) -> bytes:
        """Read bytes at an offset."""
        return ctypes.string_at(self.address + offset, size)


class OwnSegment(Segment):
    """A segment made by this process; it can be mapped by others until `seal`."""

    def __init__(self, size: int) -> None:
        hold_standard_streams()
        self._descriptor = os.memfd_create("nxd_state", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, size)
            super().__init__(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise
        token = secrets.randbits(63)
        self.words[_TOKEN_AT // _WORD] = token
        self.handle = Handle(os.getpid(), self._descriptor, size, token)

    def seal(self) -> None:
        """Close the descriptor: no other process can map this any more."""
        os.close(self._descriptor)


def map_segment(handle: Any) -> Segment:
    """Map another process's segment.

    Args:
        handle: what `Handle.to_json` gave there.

    Raises:
        OSError: it cannot be opened, or is not the one that the handle describes.
    """
    wanted = Handle(*handle)
    descriptor = os.open(f"/proc/{wanted.pid}/fd/{wanted.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != wanted.size:
            raise OSError(f"descriptor {wanted.descriptor} of process {wanted.pid} has not {wanted.size} bytes")
        segment = Segment(descriptor, wanted.size)
    finally:
        os.close(descriptor)
    if segment.words[_TOKEN_AT // _WORD] != wanted.token:
        raise OSError(f"descriptor {wanted.descriptor} of process {wanted.pid} is another segment than announced")
    return segment
