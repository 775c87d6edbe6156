"""Giving back the memory of mapped files once their values have been copied.

The system keeps pages of a mapped file for as long as there is room, but counts them as the process's own; so a
rank would seem, to whoever limits it, to hold every byte that it has read.
"""

import ctypes
import mmap

from torch import Tensor


def release(tensor: Tensor) -> None:
    """Give back the whole pages under a view of a read-only mapped file; the file's values stay readable."""
    if not tensor.numel() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + reach * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
