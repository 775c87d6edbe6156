"""All-gather: every rank posts its tensor, a slot's worth in each round, and copies those of the others."""

import torch
from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes, empty, plain
from nxd_state.shared_memory.layout import SLOT_BYTES
from nxd_state.shared_memory.pieces import SMALL_BYTES, in_pieces
from nxd_state.shared_memory.rounds import Rounds


def all_gather(rounds: Rounds, tensor: Tensor, dim: int) -> Steps:
    """Concatenate the ranks' tensors along `dim`."""
    what = signature.encode("all_gather", tensor.numel(), tensor.dtype)
    if tensor.nbytes <= SMALL_BYTES:
        this = yield from rounds.meet(what, plain(tensor))
        return torch.cat(rounds.views(this, tensor.dtype, tensor.shape), dim)
    gathered = yield from _gather_stack(rounds, plain(tensor), what)
    return gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(0), dim)


def _gather_stack(rounds: Rounds, tensor: Tensor, what: int) -> Steps:
    """Stack the ranks' tensors on a new dim 0."""
    size, source = tensor.nbytes, tensor.data_ptr()
    gathered = empty((rounds.size, *tensor.shape), tensor.dtype)
    target = gathered.data_ptr()

    def write(this: int, start: int, size: int) -> None:
        copy_bytes(rounds.address(rounds.rank, this), source + start, size)

    def read(this: int, start: int, piece: int) -> None:
        for peer in rounds.peers:
            copy_bytes(target + peer * size + start, rounds.address(peer, this), piece)

    yield from in_pieces(rounds, what, size, SLOT_BYTES, write, read)
    copy_bytes(target + rounds.rank * size, source, size)
    return gathered
