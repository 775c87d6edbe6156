"""Copies what a rank has to write into the arena, in the order of the data file, whole or slice by slice."""

from collections.abc import Iterable

import torch

from nxd_ckpt.asynchronous.handover import Handover, Slice
from nxd_ckpt.tensor_bytes import pieces_of


def stage(tensors: Iterable[torch.Tensor], memory: torch.Tensor, slot_bytes: int, handover: Handover) -> None:
    """Fills slots with the tensors' elements, one tensor behind the other, and hands each slot over.

    Args:
        tensors: of any strides and devices; larger element sizes first, so that each is aligned where it comes to lie.
        memory: the arena, `uint8[at least num_slots * slot_bytes]`.
        slot_bytes: size of a slot, a multiple of 64.
        handover: where to, and when a slot is free.

    Raises:
        Stopped: nothing more is going to be written.
    """
    start, used = handover.wait_for_slot() * slot_bytes, 0
    for tensor in tensors:
        for piece in pieces_of(_where_it_can_be_cut(tensor), slot_bytes):
            if used + piece.nbytes > slot_bytes:
                handover.put(Slice(start, used))
                start, used = handover.wait_for_slot() * slot_bytes, 0
            target = memory[start + used : start + used + piece.nbytes]
            target.view(piece.dtype).view(piece.shape).copy_(piece)
            used += piece.nbytes
    handover.put(Slice(start, used))
    handover.complete()


def _where_it_can_be_cut(tensor: torch.Tensor) -> torch.Tensor:
    """Cutting up a tensor of an XLA device would compile a graph per piece, so those come to the CPU as a whole."""
    tensor = tensor.detach()
    return tensor if tensor.device.type in {"cpu", "cuda"} else tensor.cpu()
