"""All-reduce: small tensors are added whole by every rank, large ones part by part, one part by each rank."""

from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes, empty, plain
from nxd_state.shared_memory.layout import SLOT_BYTES, piece_of
from nxd_state.shared_memory.reduction import combine
from nxd_state.shared_memory.rounds import Rounds

_SMALL_BYTES = 64 * 1024  # up to here one more wait costs more than adding everything everywhere
_ALIGNMENT = 16  # elements to which parts are rounded


def all_reduce(rounds: Rounds, tensor: Tensor, op: str, *, in_place: bool) -> Steps:
    """Combine the ranks' tensors, into `tensor` itself or a new one."""
    what = signature.encode("all_reduce", tensor.numel(), tensor.dtype, op)
    source = plain(tensor)
    if tensor.nbytes <= _SMALL_BYTES:
        this = yield from rounds.meet(what, source)
        views = rounds.views(this, tensor.dtype, tensor.shape)
        return combine(views, op, tensor if in_place else None)
    if not in_place:
        return (yield from _by_parts(rounds, source, op, empty(tensor.shape, tensor.dtype), what))
    yield from _by_parts(rounds, source, op, source, what)
    return tensor if source is tensor else tensor.copy_(source)


def _by_parts(rounds: Rounds, tensor: Tensor, op: str, out: Tensor, what: int) -> Steps:
    """Three things go on, each a round behind the one before: posting, adding this rank's part, taking the others'."""
    per_round = piece_of(tensor.nbytes, SLOT_BYTES) // tensor.dtype.itemsize
    number = -(-tensor.numel() // per_round)
    first = rounds.reserve(number)
    source, target = tensor.view(-1), out.view(-1)
    for step in range(number + 2):
        if step < number:
            _post(rounds, first + step, source[step * per_round : (step + 1) * per_round])
            rounds.post(first + step, what)
        if 0 < step <= number:
            yield from rounds.all_posted(first + step - 1, what)
            _reduce(rounds, first + step - 1, source[(step - 1) * per_round : step * per_round], op)
            rounds.publish_reduced(first + step - 1)
        if step > 1:
            yield from rounds.all_reduced(first + step - 2)
            _take(rounds, first + step - 2, target[(step - 2) * per_round : (step - 1) * per_round])
    return out


def _part(rounds: Rounds, numel: int, index: int) -> tuple[int, int]:
    """Where the part that a rank adds begins and ends."""
    length = -(-numel // (rounds.size * _ALIGNMENT)) * _ALIGNMENT
    return min(index * length, numel), min((index + 1) * length, numel)


def _post(rounds: Rounds, this: int, chunk: Tensor) -> None:
    """Write to the slot what the others add."""
    begin, end = (edge * chunk.dtype.itemsize for edge in _part(rounds, chunk.numel(), rounds.rank))
    slot, address = rounds.address(rounds.rank, this), chunk.data_ptr()
    copy_bytes(slot, address, begin)
    copy_bytes(slot + end, address + end, chunk.nbytes - end)


def _reduce(rounds: Rounds, this: int, chunk: Tensor, op: str) -> None:
    """Add up this rank's part, in its slot."""
    begin, end = _part(rounds, chunk.numel(), rounds.rank)
    if begin == end:
        return
    views = list(rounds.views(this, chunk.dtype, (end - begin,), begin * chunk.dtype.itemsize))
    out, views[rounds.rank] = views[rounds.rank], chunk[begin:end]
    combine(views, op, out)


def _take(rounds: Rounds, this: int, chunk: Tensor) -> None:
    """Copy the parts that the ranks have added."""
    address, itemsize = chunk.data_ptr(), chunk.dtype.itemsize
    for index in range(rounds.size):
        begin, end = _part(rounds, chunk.numel(), index)
        copy_bytes(address + begin * itemsize, rounds.address(index, this) + begin * itemsize, (end - begin) * itemsize)
