"""Copying memory by address: cheaper than by tensors, on one thread, and unseen by autograd and dispatch modes."""

import ctypes

from torch import Tensor

copy_bytes = ctypes.memmove  # (destination, source, count); runs without the interpreter's lock


def plain(tensor: Tensor) -> Tensor:
    """The elements lying in memory one after the other, as they are: `tensor` itself where they do."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
