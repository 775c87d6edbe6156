"""What is too large for one round goes piece by piece: while the others' is copied, the next one is posted already."""

from collections.abc import Callable, Generator

from nxd_state.shared_memory.channel import Awaited
from nxd_state.shared_memory.layout import piece_of
from nxd_state.shared_memory.rounds import Rounds

SMALL_BYTES = 256 * 1024  # up to here one round is enough; above, copying while others copy is worth more waits

# What to do with one piece: (its round, its first byte, its bytes).
OnPiece = Callable[[int, int, int], None]


def in_pieces(
    rounds: Rounds, what: int, size: int, largest: int, write: OnPiece, read: OnPiece
) -> Generator[Awaited, None, None]:
    """Go through as many rounds as `size` bytes need.

    Args:
        rounds: of the group.
        what: the signature.
        size: bytes of what is cut into pieces.
        largest: how many of them a round can carry.
        write: puts a piece into this rank's slot.
        read: takes the same piece of what all ranks have posted.
    """
    piece = piece_of(size, largest)
    number = -(-size // piece)
    first = rounds.reserve(number)
    for step in range(number + 1):
        if step < number:
            start = step * piece
            write(first + step, start, min(piece, size - start))
            rounds.post(first + step, what)
        if step > 0:
            start = (step - 1) * piece
            yield from rounds.all_posted(first + step - 1, what)
            read(first + step - 1, start, min(piece, size - start))
