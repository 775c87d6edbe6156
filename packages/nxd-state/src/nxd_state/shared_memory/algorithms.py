"""The algorithms of the collectives: which rank posts what, and which adds or copies it, round by round.

A tensor that fits one round is posted whole. A larger one goes piece by piece: while the others' piece is copied, the
next one is posted already. An all-reduce adds small tensors whole on every rank, and a part of large ones on each.
Parts are always added in the order of the ranks, so every rank and every run gets the same bits.
"""

import functools
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from nxd_state.shared_memory.channel import Awaited, Rounds, Steps
from nxd_state.shared_memory.memory import SLOT_BYTES, copy_bytes, empty, encode_signature, piece_of, plain

_HALF = (torch.float16, torch.bfloat16)
_TWO: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
REDUCTIONS = tuple(_TWO)


@functools.cache
def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Raise a RuntimeError for a dtype that torch cannot add or compare, before anything is sent."""
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        one = torch.ones(1, device="cpu").to(dtype)
        try:
            combine([one, one, one], op)
        except (RuntimeError, TypeError) as error:
            raise RuntimeError(f"op={op!r} is not defined for {dtype}: {error}") from error


def combine(parts: Sequence[Tensor], op: str, out: Tensor | None = None) -> Tensor:
    """Combine at least two parts of one shape and dtype into a new tensor or `out`, which must not be one of them.

    Half precision is added in float32 and rounded once.
    """
    two = _TWO[op]
    if parts[0].dtype in _HALF and (op == "avg" or (op == "sum" and len(parts) > 2)):
        wide = combine([parts[0].float(), *parts[1:]], op)
        return wide.to(parts[0].dtype) if out is None else out.copy_(wide)
    total = two(parts[0], parts[1]) if out is None else two(parts[0], parts[1], out=out)
    for part in parts[2:]:
        two(total, part, out=total)
    return total.div_(len(parts)) if op == "avg" else total


SMALL_BYTES = 256 * 1024  # up to here one round is enough; above, copying while others copy is worth more waits

# Called for one piece: (round, first byte, number of bytes).
OnPiece = Callable[[int, int, int], None]


def in_pieces(
    rounds: Rounds, signature: int, size: int, largest: int, write: OnPiece, read: OnPiece
) -> Generator[Awaited, None, None]:
    """Go through as many rounds as `size` bytes need.

    Args:
        rounds: the rounds of the group.
        signature: the signature of the collective, the same on every rank.
        size: number of bytes to cut into pieces.
        largest: number of bytes that a round can carry.
        write: puts a piece into this rank's slot.
        read: takes the same piece from the slots of all ranks.
    """
    piece = piece_of(size, largest)
    number = -(-size // piece)
    first = rounds.reserve(number)
    for step in range(number + 1):
        if step < number:
            start = step * piece
            write(first + step, start, min(piece, size - start))
            rounds.post(first + step, signature)
        if step > 0:
            start = (step - 1) * piece
            yield from rounds.all_posted(first + step - 1, signature)
            read(first + step - 1, start, min(piece, size - start))


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

    def write(round_number: int, start: int, size: int) -> None:
        slot = rounds.address(rounds.rank, round_number)
        for peer in rounds.peers:
            copy_bytes(slot + peer * rounds.part_bytes, source + peer * part_size + start, size)

    return write


_ADDED_WHOLE_BYTES = 64 * 1024  # up to here one more wait costs more than adding everything everywhere
_ALIGNMENT = 16  # elements to which parts are rounded


def all_reduce(rounds: Rounds, tensor: Tensor, op: str, *, in_place: bool) -> Steps:
    """Combine the ranks' tensors, into `tensor` itself or a new one."""
    signature = encode_signature("all_reduce", tensor.numel(), tensor.dtype, op)
    source = plain(tensor)
    if tensor.nbytes <= _ADDED_WHOLE_BYTES:
        round_number = yield from rounds.meet(signature, source)
        views = rounds.views(round_number, tensor.dtype, tensor.shape)
        return combine(views, op, tensor if in_place else None)
    if not in_place:
        return (yield from _all_reduce_parts(rounds, source, op, empty(tensor.shape, tensor.dtype), signature))
    yield from _all_reduce_parts(rounds, source, op, source, signature)
    return tensor if source is tensor else tensor.copy_(source)


def _all_reduce_parts(rounds: Rounds, tensor: Tensor, op: str, out: Tensor, signature: int) -> Steps:
    """Three things go on, each a round behind the one before: posting, adding this rank's part, taking the others'."""
    per_round = piece_of(tensor.nbytes, SLOT_BYTES) // tensor.dtype.itemsize
    number = -(-tensor.numel() // per_round)
    first = rounds.reserve(number)
    source, target = tensor.view(-1), out.view(-1)
    for step in range(number + 2):
        if step < number:
            _post_parts(rounds, first + step, source[step * per_round : (step + 1) * per_round])
            rounds.post(first + step, signature)
        if 0 < step <= number:
            yield from rounds.all_posted(first + step - 1, signature)
            _reduce_part(rounds, first + step - 1, source[(step - 1) * per_round : step * per_round], op)
            rounds.publish_reduced(first + step - 1)
        if step > 1:
            yield from rounds.all_reduced(first + step - 2)
            _take_parts(rounds, first + step - 2, target[(step - 2) * per_round : (step - 1) * per_round])
    return out


def _part_of(rounds: Rounds, numel: int, index: int) -> tuple[int, int]:
    """The first and the end element of the part that a rank reduces."""
    length = -(-numel // (rounds.size * _ALIGNMENT)) * _ALIGNMENT
    return min(index * length, numel), min((index + 1) * length, numel)


def _post_parts(rounds: Rounds, round_number: int, chunk: Tensor) -> None:
    """Write the parts that the others add to this rank's slot."""
    begin, end = (edge * chunk.dtype.itemsize for edge in _part_of(rounds, chunk.numel(), rounds.rank))
    slot, address = rounds.address(rounds.rank, round_number), chunk.data_ptr()
    copy_bytes(slot, address, begin)
    copy_bytes(slot + end, address + end, chunk.nbytes - end)


def _reduce_part(rounds: Rounds, round_number: int, chunk: Tensor, op: str) -> None:
    """Add up this rank's part, in its slot."""
    begin, end = _part_of(rounds, chunk.numel(), rounds.rank)
    if begin == end:
        return
    views = list(rounds.views(round_number, chunk.dtype, (end - begin,), begin * chunk.dtype.itemsize))
    out, views[rounds.rank] = views[rounds.rank], chunk[begin:end]
    combine(views, op, out)


def _take_parts(rounds: Rounds, round_number: int, chunk: Tensor) -> None:
    """Copy the parts that the ranks have added."""
    address, itemsize = chunk.data_ptr(), chunk.dtype.itemsize
    for index in range(rounds.size):
        begin, end = _part_of(rounds, chunk.numel(), index)
        copy_bytes(
            address + begin * itemsize, rounds.address(index, round_number) + begin * itemsize, (end - begin) * itemsize
        )


def all_gather(rounds: Rounds, tensor: Tensor, dim: int) -> Steps:
    """Concatenate the ranks' tensors along `dim`."""
    signature = encode_signature("all_gather", tensor.numel(), tensor.dtype)
    if tensor.nbytes <= SMALL_BYTES:
        round_number = yield from rounds.meet(signature, plain(tensor))
        return torch.cat(rounds.views(round_number, tensor.dtype, tensor.shape), dim)
    gathered = yield from _gather_stack(rounds, plain(tensor), signature)
    return gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(0), dim)


def _gather_stack(rounds: Rounds, tensor: Tensor, signature: int) -> Steps:
    """Stack the ranks' tensors on a new dim 0."""
    size, source = tensor.nbytes, tensor.data_ptr()
    gathered = empty((rounds.size, *tensor.shape), tensor.dtype)
    target = gathered.data_ptr()

    def write(round_number: int, start: int, size: int) -> None:
        copy_bytes(rounds.address(rounds.rank, round_number), source + start, size)

    def read(round_number: int, start: int, piece: int) -> None:
        for peer in rounds.peers:
            copy_bytes(target + peer * size + start, rounds.address(peer, round_number), piece)

    yield from in_pieces(rounds, signature, size, SLOT_BYTES, write, read)
    copy_bytes(target + rounds.rank * size, source, size)
    return gathered


def reduce_scatter(rounds: Rounds, tensor: Tensor, dim: int, op: str) -> Steps:
    """Combine the ranks' tensors, and keep this rank's part along `dim`."""
    signature = encode_signature("reduce_scatter", tensor.numel(), tensor.dtype, op)
    shape = part_shape(tensor, rounds.size, dim)
    parts = cut(tensor, rounds.size, dim)
    if tensor.nbytes > SMALL_BYTES:
        return (yield from _reduce_scatter_pieces(rounds, parts, shape, op, signature))
    round_number = yield from rounds.meet(signature, parts)
    return combine(rounds.views(round_number, tensor.dtype, shape, rounds.rank * (parts.nbytes // rounds.size)), op)


def _reduce_scatter_pieces(rounds: Rounds, parts: Tensor, shape: torch.Size, op: str, signature: int) -> Steps:
    itemsize, part_size = parts.dtype.itemsize, parts.nbytes // rounds.size
    own = parts.view(rounds.size, -1)[rounds.rank]
    result = empty(shape, parts.dtype)
    target = result.view(-1)
    offset = rounds.rank * rounds.part_bytes  # where in every slot this rank's parts begin

    def read(round_number: int, start: int, size: int) -> None:
        here = slice(start // itemsize, (start + size) // itemsize)
        pieces = list(rounds.views(round_number, parts.dtype, (size // itemsize,), offset))
        pieces[rounds.rank] = own[here]
        combine(pieces, op, target[here])

    yield from in_pieces(rounds, signature, part_size, rounds.part_bytes, writer(rounds, parts), read)
    return result


def all_to_all(rounds: Rounds, tensor: Tensor, split_dim: int, concat_dim: int) -> Steps:
    """Cut `tensor` along `split_dim`, concatenate what comes along `concat_dim`."""
    signature = encode_signature("all_to_all", tensor.numel(), tensor.dtype)
    shape = part_shape(tensor, rounds.size, split_dim)
    parts = cut(tensor, rounds.size, split_dim)
    if tensor.nbytes <= SMALL_BYTES:
        round_number = yield from rounds.meet(signature, parts)
        start = rounds.rank * (parts.nbytes // rounds.size)
        return torch.cat(rounds.views(round_number, tensor.dtype, shape, start), concat_dim)
    received = yield from _exchange_parts(rounds, parts, shape, signature)
    return received.flatten(0, 1) if concat_dim == 0 else torch.cat(received.unbind(0), concat_dim)


def _exchange_parts(rounds: Rounds, parts: Tensor, shape: torch.Size, signature: int) -> Steps:
    """Stack the parts for this rank on a new dim 0."""
    received = empty((rounds.size, *shape), parts.dtype)
    target, part_size = received.data_ptr(), parts.nbytes // rounds.size
    offset = rounds.rank * rounds.part_bytes

    def read(round_number: int, start: int, size: int) -> None:
        for peer in rounds.peers:
            copy_bytes(target + peer * part_size + start, rounds.address(peer, round_number) + offset, size)

    yield from in_pieces(rounds, signature, part_size, rounds.part_bytes, writer(rounds, parts), read)
    own = rounds.rank * part_size
    copy_bytes(target + own, parts.data_ptr() + own, part_size)
    return received


def broadcast(rounds: Rounds, tensor: Tensor, source: int) -> Steps:
    """A copy of the tensor of the rank with index `source`; the others' give shape and dtype."""
    signature = encode_signature("broadcast", tensor.numel(), tensor.dtype, root=source)
    posted = plain(tensor) if rounds.rank == source else None
    if tensor.nbytes > SMALL_BYTES:
        return (yield from _broadcast_pieces(rounds, tensor, posted, source, signature))
    round_number = yield from rounds.meet(signature, posted)
    return rounds.views(round_number, tensor.dtype, tensor.shape)[source].clone()


def _broadcast_pieces(rounds: Rounds, tensor: Tensor, posted: Tensor | None, source: int, signature: int) -> Steps:
    copy = empty(tensor.shape, tensor.dtype)
    target = copy.data_ptr()

    def write(round_number: int, start: int, size: int) -> None:
        if posted is not None:
            copy_bytes(rounds.address(source, round_number), posted.data_ptr() + start, size)

    def read(round_number: int, start: int, size: int) -> None:
        copy_bytes(target + start, rounds.address(source, round_number), size)

    yield from in_pieces(rounds, signature, tensor.nbytes, SLOT_BYTES, write, read)
    return copy


def barrier(rounds: Rounds) -> Steps:
    """Wait until every rank has come here."""
    yield from rounds.meet(encode_signature("barrier"))
    return torch.empty(0, device="cpu")
