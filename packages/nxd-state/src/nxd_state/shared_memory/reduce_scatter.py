"""Reduce-scatter: every rank posts a part for each other one, and adds up those for itself."""

import torch
from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import empty
from nxd_state.shared_memory.parts import cut, part_shape, writer
from nxd_state.shared_memory.pieces import SMALL_BYTES, in_pieces
from nxd_state.shared_memory.reduction import combine
from nxd_state.shared_memory.rounds import Rounds


def reduce_scatter(rounds: Rounds, tensor: Tensor, dim: int, op: str) -> Steps:
    """Combine the ranks' tensors, of which this rank gets its part along `dim`."""
    what = signature.encode("reduce_scatter", tensor.numel(), tensor.dtype, op)
    shape = part_shape(tensor, rounds.size, dim)
    parts = cut(tensor, rounds.size, dim)
    if tensor.nbytes > SMALL_BYTES:
        return (yield from _in_many_rounds(rounds, parts, shape, op, what))
    this = yield from rounds.meet(what, parts)
    return combine(rounds.views(this, tensor.dtype, shape, rounds.rank * (parts.nbytes // rounds.size)), op)


def _in_many_rounds(rounds: Rounds, parts: Tensor, shape: torch.Size, op: str, what: int) -> Steps:
    itemsize, part_size = parts.dtype.itemsize, parts.nbytes // rounds.size
    own = parts.view(rounds.size, -1)[rounds.rank]
    result = empty(shape, parts.dtype)
    target = result.view(-1)
    offset = rounds.rank * rounds.part_bytes  # where in every slot this rank's parts begin

    def read(this: int, start: int, size: int) -> None:
        here = slice(start // itemsize, (start + size) // itemsize)
        pieces = list(rounds.views(this, parts.dtype, (size // itemsize,), offset))
        pieces[rounds.rank] = own[here]
        combine(pieces, op, target[here])

    yield from in_pieces(rounds, what, part_size, rounds.part_bytes, writer(rounds, parts), read)
    return result
