"""A part for each rank: posted by all, taken by the one for which it is. What reduce-scatter and all-to-all share."""

from collections.abc import Callable

from torch import Tensor

from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes
from nxd_state.shared_memory.layout import piece_of
from nxd_state.shared_memory.rounds import Rounds

# What to do with the part of the ranks that lie in their slots: (round, first byte, bytes).
TakeParts = Callable[[int, int, int], None]


_SMALL_BYTES = 256 * 1024  # above, copying while others copy is worth more waits


def exchange(rounds: Rounds, parts: Tensor, what: int, take: TakeParts, result: Tensor) -> Steps:
    """Post a stack of parts in as many rounds as it needs, taking what the others posted one round later.

    Args:
        rounds: of the group.
        parts: contiguous `[size of the group, ...]`.
        what: the signature.
        take: called when all ranks have posted the same piece of their parts.
        result: what to return in the end.
    """
    source = parts.data_ptr()
    part_size = parts.nbytes // rounds.size
    piece = piece_of(part_size, rounds.part_bytes())
    number = -(-part_size // piece)
    first = rounds.reserve(number)
    for step in range(number + 1):
        if step < number:
            start = step * piece
            yield from rounds.free(first + step)
            slot = rounds.address(rounds.rank, first + step)
            for peer in rounds.peers:
                copy_bytes(
                    slot + peer * rounds.part_bytes(), source + peer * part_size + start, min(piece, part_size - start)
                )
            rounds.post(first + step, what)
        if step > 0:
            start = (step - 1) * piece
            yield from rounds.all_posted(first + step - 1, what)
            take(first + step - 1, start, min(piece, part_size - start))
            rounds.take(first + step - 1)
    return result


def is_small(tensor: Tensor) -> bool:
    """Whether to post all parts at once: they fit in one slot."""
    return tensor.nbytes <= _SMALL_BYTES


def split(tensor: Tensor, parts: int, dim: int) -> Tensor:
    """Equal parts along `dim`, stacked on a new dim 0, in the same memory."""
    parted = tensor.unflatten(dim, (parts, tensor.shape[dim] // parts))
    return parted.movedim(dim, 0) if dim else parted
