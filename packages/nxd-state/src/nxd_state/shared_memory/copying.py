"""Copying memory by address: cheaper than by tensors, on one thread, and unseen by autograd and dispatch modes."""

import ctypes

import torch
from torch import Tensor

copy_bytes = ctypes.memmove  # (destination, source, count); runs without the interpreter's lock

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_HUGEPAGE = 14  # of Linux, see madvise(2)
_PAGE = 4096
_LARGE_BYTES = 4 * 2**20


def plain(tensor: Tensor) -> Tensor:
    """The elements lying in memory one after the other, as they are: `tensor` itself where they do."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a result, in huge pages where it is large and the kernel grants them on request.

    What is new to the process is given page by page, which with small pages takes several times as long as to fill it.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.nbytes >= _LARGE_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        _madvise(first, tensor.data_ptr() + tensor.nbytes - first, _MADV_HUGEPAGE)
    return tensor
