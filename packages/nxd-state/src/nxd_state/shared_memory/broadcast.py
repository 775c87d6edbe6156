"""Broadcast: one rank posts its tensor, a slot's worth in each round, the others copy it. Barrier: one empty round."""

import torch
from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes, plain
from nxd_state.shared_memory.layout import SLOT_BYTES, piece_of
from nxd_state.shared_memory.rounds import Rounds


def broadcast(rounds: Rounds, tensor: Tensor, source: int) -> Steps:
    """A copy of the tensor of the rank with index `source`; the others' give shape and dtype."""
    what = signature.encode("broadcast", tensor.numel(), tensor.dtype, root=source)
    is_source = rounds.rank == source
    copy = plain(tensor).clone() if is_source else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    address, size = copy.data_ptr(), copy.nbytes
    piece = piece_of(size, SLOT_BYTES)
    number = max(1, -(-size // piece))
    first = rounds.reserve(number)
    for step in range(number + 1):
        if step < number:
            yield from rounds.free(first + step)
            if is_source:
                start = step * piece
                copy_bytes(rounds.address(source, first + step), address + start, min(piece, size - start))
            rounds.post(first + step, what)
        if step > 0:
            yield from rounds.all_posted(first + step - 1, what)
            if not is_source:
                start = (step - 1) * piece
                copy_bytes(address + start, rounds.address(source, first + step - 1), min(piece, size - start))
            rounds.take(first + step - 1)
    return copy


def barrier(rounds: Rounds) -> Steps:
    """Wait until every rank has come here."""
    what = signature.encode("barrier")
    this = rounds.reserve()
    yield from rounds.free(this)
    rounds.post(this, what)
    yield from rounds.all_posted(this, what)
    rounds.take(this)
    return torch.empty(0, device="cpu")
