"""All-to-all: every rank posts a part for each other one, and concatenates those for itself."""

import torch
from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes, empty
from nxd_state.shared_memory.parts import cut, part_shape, writer
from nxd_state.shared_memory.pieces import SMALL_BYTES, in_pieces
from nxd_state.shared_memory.rounds import Rounds


def all_to_all(rounds: Rounds, tensor: Tensor, split_dim: int, concat_dim: int) -> Steps:
    """Cut `tensor` along `split_dim`, concatenate what comes along `concat_dim`."""
    what = signature.encode("all_to_all", tensor.numel(), tensor.dtype)
    shape = part_shape(tensor, rounds.size, split_dim)
    parts = cut(tensor, rounds.size, split_dim)
    if tensor.nbytes <= SMALL_BYTES:
        this = yield from rounds.meet(what, parts)
        start = rounds.rank * (parts.nbytes // rounds.size)
        return torch.cat(rounds.views(this, tensor.dtype, shape, start), concat_dim)
    received = yield from _exchange(rounds, parts, shape, what)
    return received.flatten(0, 1) if concat_dim == 0 else torch.cat(received.unbind(0), concat_dim)


def _exchange(rounds: Rounds, parts: Tensor, shape: torch.Size, what: int) -> Steps:
    """Stack the parts for this rank on a new dim 0."""
    received = empty((rounds.size, *shape), parts.dtype)
    target, part_size = received.data_ptr(), parts.nbytes // rounds.size
    offset = rounds.rank * rounds.part_bytes

    def read(this: int, start: int, size: int) -> None:
        for peer in rounds.peers:
            copy_bytes(target + peer * part_size + start, rounds.address(peer, this) + offset, size)

    yield from in_pieces(rounds, what, part_size, rounds.part_bytes, writer(rounds, parts), read)
    own = rounds.rank * part_size
    copy_bytes(target + own, parts.data_ptr() + own, part_size)
    return received
