"""The memory that a model's processes share, and the location of each input and output in it.

Shared memory has no name, only a file descriptor that the workers inherit, so nothing is left behind when all of them
have ended, for whatever reason.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from nxd_state.processes import hold_standard_streams
from torch import Tensor

from nxd_trace.signature import Signature, TensorSpec

_ALIGNMENT = 64  # bytes; compiled programs expect this of their inputs


def new_shared_file() -> int:
    """Create empty shared memory and return its file descriptor; the caller closes it."""
    hold_standard_streams()
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nxd_trace")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>


def keep_freed_memory() -> None:
    """Make glibc keep the memory that this process frees for its next call; does nothing with another C library.

    Otherwise glibc returns each large tensor to the system, and the next call of the program waits for its pages to be
    zeroed again. For the keys and values that a decode step gathers, that takes five times as long as the copy itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


class SharedTensors:
    """The inputs and outputs of every program as tensors in shared memory.

    Programs run one at a time, so they use the same bytes.

    Args:
        file: descriptor of the shared memory, which is extended to the needed length.
        signatures: signatures of the programs.

    Attributes:
        inputs: the input tensors of each program.
        outputs: the output tensors of each program.
    """

    def __init__(self, file: int, signatures: Sequence[Signature]) -> None:
        first_output = max((_end_of(signature.inputs, 0) for signature in signatures), default=0)
        end = max((_end_of(signature.outputs, first_output) for signature in signatures), default=0)
        length = max(end, _ALIGNMENT)
        if os.fstat(file).st_size < length:
            os.ftruncate(file, length)
        memory = mmap.mmap(file, length)  # lives as long as any tensor in it
        self.inputs = [_views(memory, signature.inputs, 0) for signature in signatures]
        self.outputs = [_views(memory, signature.outputs, first_output) for signature in signatures]


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _end_of(specs: Sequence[TensorSpec], start: int) -> int:
    return start + sum(_aligned(spec.nbytes) for spec in specs)


def _views(memory: mmap.mmap, specs: Sequence[TensorSpec], start: int) -> list[Tensor]:
    views = []
    for spec in specs:
        if spec.numel == 0:
            views.append(torch.empty(spec.shape, dtype=spec.torch_dtype))
        else:
            flat = torch.frombuffer(memory, dtype=spec.torch_dtype, count=spec.numel, offset=start)
            views.append(flat.view(spec.shape))
        start += _aligned(spec.nbytes)
    return views
