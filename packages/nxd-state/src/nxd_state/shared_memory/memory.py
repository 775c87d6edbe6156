"""Memory that the processes of one host share: which processes can, the segments, their layout, copying by address,
and the signatures of operations, which are words of a segment.

A segment is a memfd: no file anywhere, no limit by the size of /dev/shm, pages taken only when first written. It has no
name, so nothing can be left over. Other processes open it through /proc while its creator keeps the descriptor; after
that the mappings alone keep it alive.
"""

import ctypes
import mmap
import os
import platform
import secrets
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_state.processes import hold_standard_streams, pid_namespace

_WORD = 8  # bytes
_PAGE = 4096

# Where a store that is seen by another core implies that those before it are: the words that say "the data is there"
# are written by plain stores, since Python has no others.
_MACHINES = ("x86_64", "AMD64")


def host_identity() -> str | None:
    """A text that is the same for processes that can map each other's memory; None if none can, or if switched off."""
    switch = os.environ.get("NXD_SHM", "1")
    if switch not in ("0", "1"):
        raise ValueError(f"unknown NXD_SHM={switch!r}; use 1 to let ranks of one host share memory, or 0")
    if switch == "0" or sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    try:
        return f"{pid_namespace()}/{os.getuid()}"
    except OSError:
        return None


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
        """The handle as plain numbers."""
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
    """A mapping, initially zero.

    Attributes:
        words: the memory as 64-bit unsigned integers; each is read and written whole.
        address: its start in this process.
        size: number of bytes.
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
    """A segment created by this process; others can map it until `seal`."""

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
        handle: the result of `Handle.to_json` there.
    """
    wanted = Handle(*handle)
    descriptor = os.open(f"/proc/{wanted.pid}/fd/{wanted.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != wanted.size:
            raise OSError(f"descriptor {wanted.descriptor} of process {wanted.pid} does not have {wanted.size} bytes")
        segment = Segment(descriptor, wanted.size)
    finally:
        os.close(descriptor)
    if segment.words[_TOKEN_AT // _WORD] != wanted.token:
        raise OSError(f"descriptor {wanted.descriptor} of process {wanted.pid} is not the segment announced")
    return segment


# The layout of the memory that a rank shares with a group. Each rank writes only its own segment, so no word has two
# writers:
#
#     line 0            the segment's token
#     line 1, 2         rounds posted, reduced (see `channel.Rounds`)
#     line 3            whether this rank has left the group, and the length of the reason
#     line 4            signatures of the rounds in flight
#     1024              the reason, as text
#     2048 + 128 p      messages to rank p: chunks sent, signatures; next line: chunks received from rank p
#     data              slots of the rounds, then for each other rank the slots of messages to it
_LINE = 64  # bytes of a cache line, which only one rank writes

POSTED, REDUCED, LEFT, SIGNATURES = (line * _LINE // _WORD for line in (1, 2, 3, 4))  # words
REASON_LENGTH = LEFT + 1
REASON = 1024  # bytes
LONGEST_REASON = 1024
_PEERS = 2048
_BYTES_PER_PEER = 2 * _LINE

ROUND_SLOTS = 5  # see `channel.Rounds`
SLOT_BYTES = 2**19  # all slots together stay in the cores' caches
MESSAGE_SLOTS = 4
_MESSAGE_SLOTS_BYTES = 2**20  # for one slot to each rank
_LEAST_MESSAGE_SLOT, _LARGEST_MESSAGE_SLOT = 2**15, 2**19

_LEAST_PIECE = 2**17  # below, a wait for each takes longer than copying it
_PIECES = 4  # into which something large is cut at least, so that ranks copy at the same time

# Other versions of this package may use another memory layout: ranks share memory only where these are equal.
LAYOUT_FORMAT = [ROUND_SLOTS, SLOT_BYTES, MESSAGE_SLOTS, _LARGEST_MESSAGE_SLOT]


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets within the segment of one rank of a group of `size` ranks."""

    size: int

    @property
    def data(self) -> int:
        """Byte at which the slots begin."""
        return -(-(_PEERS + self.size * _BYTES_PER_PEER) // _PAGE) * _PAGE

    @property
    def bytes(self) -> int:
        """Size of the whole segment; memory is taken only for slots that have been used."""
        return self.message_slot(self.size, 0)

    @property
    def message_slot_bytes(self) -> int:
        """Size of one slot for messages to one rank; smaller in groups of many ranks."""
        return min(_LARGEST_MESSAGE_SLOT, max(_LEAST_MESSAGE_SLOT, _MESSAGE_SLOTS_BYTES // self.size // _PAGE * _PAGE))

    def slot(self, round_number: int) -> int:
        """Byte of the slot that a round uses."""
        return self.data + round_number % ROUND_SLOTS * SLOT_BYTES

    def message_slot(self, peer: int, chunk: int) -> int:
        """Byte of the slot that a chunk of a message to `peer` uses."""
        slot = peer * MESSAGE_SLOTS + chunk % MESSAGE_SLOTS
        return self.data + ROUND_SLOTS * SLOT_BYTES + slot * self.message_slot_bytes

    def sent(self, peer: int) -> int:
        """Word that counts the chunks sent to `peer`; the signatures of those in flight follow it."""
        return (_PEERS + peer * _BYTES_PER_PEER) // _WORD

    def received(self, peer: int) -> int:
        """Word that counts the chunks received from `peer`."""
        return self.sent(peer) + _LINE // _WORD


def piece_of(size: int, largest: int) -> int:
    """Bytes of the pieces to cut something into that slots of `largest` bytes carry: a multiple of every element's."""
    return min(largest, max(_LEAST_PIECE, -(-size // (_PIECES * _LINE)) * _LINE))


# Copying by address is cheaper than by tensors, runs on one thread, and is unseen by autograd and dispatch modes.
copy_bytes = ctypes.memmove  # (destination, source, count); runs without the interpreter's lock

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_HUGEPAGE = 14  # of Linux, see madvise(2)
_LARGE_BYTES = 4 * 2**20


def plain(tensor: Tensor) -> Tensor:
    """The tensor with its elements contiguous in memory; `tensor` itself if they are."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a result; in huge pages if it is large and the kernel grants them.

    New memory is mapped page by page, which with small pages takes several times as long as filling it.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.nbytes >= _LARGE_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        _madvise(first, tensor.data_ptr() + tensor.nbytes - first, _MADV_HUGEPAGE)
    return tensor


# A signature is a rank's next operation as one word, which its peers compare with their own.
# 64 bits: operation (4), reduction (3), dtype (6), root (7), number of elements (44).
OPERATIONS = ("", "barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send to recv")
_REDUCTIONS = ("", "sum", "avg", "max", "min")
# fmt: off
_DTYPE_NAMES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "uint16", "uint32", "uint64", "float4_e2m1fn_x2",
)
# fmt: on
_NUMEL_BITS, _ROOT_BITS, _DTYPE_BITS, _REDUCTION_BITS = 44, 7, 6, 3
_ROOT_AT = _NUMEL_BITS
_DTYPE_AT = _ROOT_AT + _ROOT_BITS
_REDUCTION_AT = _DTYPE_AT + _DTYPE_BITS
_OPERATION_AT = _REDUCTION_AT + _REDUCTION_BITS

_OPERATION_CODES = {name: code << _OPERATION_AT for code, name in enumerate(OPERATIONS)}
_REDUCTION_CODES = {name: code << _REDUCTION_AT for code, name in enumerate(_REDUCTIONS)}
_DTYPE_CODES = {
    getattr(torch, name): code << _DTYPE_AT for code, name in enumerate(_DTYPE_NAMES, 1) if hasattr(torch, name)
}


def encode_signature(
    operation: str, numel: int = 0, dtype: torch.dtype | None = None, reduction: str = "", root: int = 0
) -> int:
    """One word for one operation; dtypes that this version does not know share a code."""
    code = _OPERATION_CODES[operation] | _REDUCTION_CODES[reduction] | root << _ROOT_AT | numel
    return code | _DTYPE_CODES.get(dtype, 0) if dtype is not None else code


def describe_signature(word: int) -> str:
    """The operation as text, such as `all_reduce(op=sum) of 4 x float32`."""
    operation = OPERATIONS[word >> _OPERATION_AT]
    reduction = _REDUCTIONS[word >> _REDUCTION_AT & (1 << _REDUCTION_BITS) - 1]
    dtype = word >> _DTYPE_AT & (1 << _DTYPE_BITS) - 1
    root = word >> _ROOT_AT & (1 << _ROOT_BITS) - 1
    numel = word & (1 << _NUMEL_BITS) - 1
    details = f"(op={reduction})" if reduction else f"(source={root})" if operation == "broadcast" else ""
    return f"{operation}{details}" + (f" of {numel} x {_DTYPE_NAMES[dtype - 1]}" if dtype else "")
