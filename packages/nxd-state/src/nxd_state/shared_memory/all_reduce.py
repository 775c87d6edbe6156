"""All-reduce: small tensors are added whole by every rank, large ones part by part, one part by each rank."""

from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes
from nxd_state.shared_memory.layout import ROUND_SLOTS, SLOT_BYTES, piece_of
from nxd_state.shared_memory.reduction import combine
from nxd_state.shared_memory.rounds import Rounds

_SMALL_BYTES = 64 * 1024  # up to here one more wait costs more than adding everything everywhere
_ALIGNMENT = 16  # elements to which parts are rounded


def all_reduce(rounds: Rounds, tensor: Tensor, op: str, out: Tensor | None) -> Steps:
    """Combine the ranks' tensors.

    Args:
        rounds: of the group.
        tensor: this rank's; any layout where it is small, else contiguous, see `is_small`.
        op: the reduction.
        out: what to write the result to, of the shape of `tensor`, which it may be; None for a new tensor.
    """
    if is_small(tensor):
        return _whole(rounds, tensor, op, out)
    return _by_parts(rounds, tensor, op, tensor.new_empty(tensor.shape) if out is None else out)


def is_small(tensor: Tensor) -> bool:
    """Whether one round and one wait are enough."""
    return tensor.nbytes <= _SMALL_BYTES


def _whole(rounds: Rounds, tensor: Tensor, op: str, out: Tensor | None) -> Steps:
    what = signature.encode("all_reduce", tensor.numel(), tensor.dtype, op)
    this = rounds.reserve()
    views = rounds.views(this, tensor.dtype, tensor.shape)
    yield from rounds.free(this)
    views[rounds.rank].copy_(tensor)
    rounds.post(this, what)
    yield from rounds.all_posted(this, what)
    result = combine(views, op) if out is None else combine(views, op, out)
    rounds.take(this)
    return result


def _by_parts(rounds: Rounds, tensor: Tensor, op: str, out: Tensor) -> Steps:
    """Three things go on, each a round behind the one before: posting, adding this rank's part, taking the others'."""
    what = signature.encode("all_reduce", tensor.numel(), tensor.dtype, op)
    per_round = piece_of(tensor.nbytes, SLOT_BYTES) // tensor.dtype.itemsize
    number = -(-tensor.numel() // per_round)
    first = rounds.reserve(number)
    source, target = tensor.view(-1), out.view(-1)
    assert ROUND_SLOTS > 3  # else a rank would wait for those that wait for it
    for step in range(number + 2):
        if step < number:
            yield from rounds.free(first + step)
            _post(rounds, first + step, source[step * per_round : (step + 1) * per_round])
            rounds.post(first + step, what)
        if 0 < step <= number:
            yield from rounds.all_posted(first + step - 1, what)
            _reduce(rounds, first + step - 1, source[(step - 1) * per_round : step * per_round], op)
            rounds.publish_reduced(first + step - 1)
        if step > 1:
            yield from rounds.all_reduced(first + step - 2)
            _take(rounds, first + step - 2, target[(step - 2) * per_round : (step - 1) * per_round])
            rounds.take(first + step - 2)
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
    views = [view[begin:end] for view in rounds.views(this, chunk.dtype, (SLOT_BYTES // chunk.dtype.itemsize,))]
    out = views[rounds.rank]
    views[rounds.rank] = chunk[begin:end]
    combine(views, op, out)


def _take(rounds: Rounds, this: int, chunk: Tensor) -> None:
    """Copy the parts that the ranks have added."""
    address, itemsize = chunk.data_ptr(), chunk.dtype.itemsize
    for index in range(rounds.size):
        begin, end = _part(rounds, chunk.numel(), index)
        copy_bytes(address + begin * itemsize, rounds.address(index, this) + begin * itemsize, (end - begin) * itemsize)
