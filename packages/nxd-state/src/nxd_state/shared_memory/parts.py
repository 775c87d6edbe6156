"""A part for each rank: posted by all, taken by the one for which it is. What reduce-scatter and all-to-all share."""

import torch
from torch import Tensor

from nxd_state.shared_memory.copying import copy_bytes, plain
from nxd_state.shared_memory.pieces import OnPiece
from nxd_state.shared_memory.rounds import Rounds


def part_shape(tensor: Tensor, parts: int, dim: int) -> torch.Size:
    """The shape of each of that many equal parts along `dim`."""
    return torch.Size((*tensor.shape[:dim], tensor.shape[dim] // parts, *tensor.shape[dim + 1 :]))


def cut(tensor: Tensor, parts: int, dim: int) -> Tensor:
    """The tensor with its parts along `dim` lying in memory one after the other; itself where they do."""
    if dim:
        tensor = tensor.unflatten(dim, (parts, tensor.shape[dim] // parts)).movedim(dim, 0)
    return plain(tensor)


def writer(rounds: Rounds, parts: Tensor) -> OnPiece:
    """Puts a piece of each part but this rank's own into the slot."""
    source, part_size = parts.data_ptr(), parts.nbytes // rounds.size

    def write(this: int, start: int, size: int) -> None:
        slot = rounds.address(rounds.rank, this)
        for peer in rounds.peers:
            copy_bytes(slot + peer * rounds.part_bytes, source + peer * part_size + start, size)

    return write
