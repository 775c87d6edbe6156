"""Reduce-scatter: every rank posts a part for each other one, and adds up those for itself."""

from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import plain
from nxd_state.shared_memory.exchange import exchange, is_small, split
from nxd_state.shared_memory.layout import SLOT_BYTES
from nxd_state.shared_memory.reduction import combine
from nxd_state.shared_memory.rounds import Rounds


def reduce_scatter(rounds: Rounds, tensor: Tensor, dim: int, op: str) -> Steps:
    """Combine the ranks' tensors, of which this rank gets its part along `dim`."""
    parts = split(tensor, rounds.size, dim)
    what = signature.encode("reduce_scatter", tensor.numel(), tensor.dtype, op)
    if is_small(tensor):
        return _in_one_round(rounds, parts, op, what)
    return _in_many_rounds(rounds, plain(parts), op, what)


def _in_one_round(rounds: Rounds, parts: Tensor, op: str, what: int) -> Steps:
    this = rounds.reserve()
    views = rounds.views(this, parts.dtype, parts.shape)
    mine = rounds.parts(this, parts.dtype, parts.shape)
    yield from rounds.free(this)
    views[rounds.rank].copy_(parts)
    rounds.post(this, what)
    yield from rounds.all_posted(this, what)
    result = combine(mine, op)
    rounds.take(this)
    return result


def _in_many_rounds(rounds: Rounds, parts: Tensor, op: str, what: int) -> Steps:
    itemsize = parts.dtype.itemsize
    own, result = parts[rounds.rank].view(-1), parts.new_empty(parts.shape[1:])
    target = result.view(-1)
    slot_shape = (SLOT_BYTES // itemsize,)
    offset = rounds.rank * rounds.part_bytes() // itemsize  # where in every slot this rank's parts begin

    def take(this: int, start: int, size: int) -> None:
        begin, numel = start // itemsize, size // itemsize
        pieces = [slot[offset : offset + numel] for slot in rounds.views(this, parts.dtype, slot_shape)]
        pieces[rounds.rank] = own[begin : begin + numel]
        combine(pieces, op, target[begin : begin + numel])

    return exchange(rounds, parts, what, take, result)
