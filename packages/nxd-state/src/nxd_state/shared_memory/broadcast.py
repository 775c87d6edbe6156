"""Broadcast: one rank posts its tensor, a slot's worth in each round, the others copy it. Barrier: one empty round."""

import torch
from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes, empty, plain
from nxd_state.shared_memory.layout import SLOT_BYTES
from nxd_state.shared_memory.pieces import SMALL_BYTES, in_pieces
from nxd_state.shared_memory.rounds import Rounds


def broadcast(rounds: Rounds, tensor: Tensor, source: int) -> Steps:
    """A copy of the tensor of the rank with index `source`; the others' give shape and dtype."""
    what = signature.encode("broadcast", tensor.numel(), tensor.dtype, root=source)
    posted = plain(tensor) if rounds.rank == source else None
    if tensor.nbytes > SMALL_BYTES:
        return (yield from _in_many_rounds(rounds, tensor, posted, source, what))
    this = yield from rounds.meet(what, posted)
    return rounds.views(this, tensor.dtype, tensor.shape)[source].clone()


def _in_many_rounds(rounds: Rounds, tensor: Tensor, posted: Tensor | None, source: int, what: int) -> Steps:
    copy = empty(tensor.shape, tensor.dtype)
    target = copy.data_ptr()

    def write(this: int, start: int, size: int) -> None:
        if posted is not None:
            copy_bytes(rounds.address(source, this), posted.data_ptr() + start, size)

    def read(this: int, start: int, size: int) -> None:
        copy_bytes(target + start, rounds.address(source, this), size)

    yield from in_pieces(rounds, what, tensor.nbytes, SLOT_BYTES, write, read)
    return copy


def barrier(rounds: Rounds) -> Steps:
    """Wait until every rank has come here."""
    yield from rounds.meet(signature.encode("barrier"))
    return torch.empty(0, device="cpu")
