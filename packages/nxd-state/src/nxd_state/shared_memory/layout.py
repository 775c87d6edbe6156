"""The layout of the memory that a rank shares with a group.

Each rank writes only its own segment, so no word has two writers:

    line 0            the segment's token
    line 1, 2         rounds posted, reduced (see `rounds`)
    line 3            whether this rank has left the group, and how long the reason is
    line 4            signatures of the rounds in flight
    1024              the reason, as text
    2048 + 128 p      messages to rank p: chunks sent, signatures; next line: chunks received from rank p
    data              slots of the rounds, then for each other rank the slots of messages to it
"""

from dataclasses import dataclass

WORD = 8  # bytes
LINE = 64  # bytes of a cache line, which only one rank writes
_PAGE = 4096

POSTED, REDUCED, LEFT, SIGNATURES = (line * LINE // WORD for line in (1, 2, 3, 4))  # words
REASON_LENGTH = LEFT + 1
REASON = 1024  # bytes
LONGEST_REASON = 1024
_PEERS = 2048
_BYTES_PER_PEER = 2 * LINE

ROUND_SLOTS = 5  # as many as `rounds` says
SLOT_BYTES = 2**19  # all slots together stay in the cores' caches
MESSAGE_SLOTS = 4
_MESSAGE_SLOTS_BYTES = 2**20  # for one slot to each rank
_LEAST_MESSAGE_SLOT, _LARGEST_MESSAGE_SLOT = 2**15, 2**19

_LEAST_PIECE = 2**17  # below, a wait for each takes longer than copying it
_PIECES = 4  # into which something large is cut at least, so that ranks copy at the same time

# Other versions of this package may use another memory layout: ranks share memory only where these are equal.
FORMAT = [ROUND_SLOTS, SLOT_BYTES, MESSAGE_SLOTS, _LARGEST_MESSAGE_SLOT]


@dataclass(frozen=True)
class Layout:
    """Offsets within the segment of one rank of a group of `size` ranks."""

    size: int

    @property
    def data(self) -> int:
        """Byte at which the slots begin."""
        return -(-(_PEERS + self.size * _BYTES_PER_PEER) // _PAGE) * _PAGE

    @property
    def bytes(self) -> int:
        """Of the whole segment; memory is taken only for slots that have been used."""
        return self.message_slot(self.size, 0)

    @property
    def message_slot_bytes(self) -> int:
        """Of one slot for messages to one rank: less where there are many of them."""
        return min(_LARGEST_MESSAGE_SLOT, max(_LEAST_MESSAGE_SLOT, _MESSAGE_SLOTS_BYTES // self.size // _PAGE * _PAGE))

    def slot(self, round_number: int) -> int:
        """Byte of the slot that a round uses."""
        return self.data + round_number % ROUND_SLOTS * SLOT_BYTES

    def message_slot(self, peer: int, chunk: int) -> int:
        """Byte of the slot that a chunk of a message to `peer` uses."""
        slot = peer * MESSAGE_SLOTS + chunk % MESSAGE_SLOTS
        return self.data + ROUND_SLOTS * SLOT_BYTES + slot * self.message_slot_bytes

    def sent(self, peer: int) -> int:
        """Word that counts the chunks sent to `peer`; the signatures of those in flight follow it."""
        return (_PEERS + peer * _BYTES_PER_PEER) // WORD

    def received(self, peer: int) -> int:
        """Word that counts the chunks received from `peer`."""
        return self.sent(peer) + LINE // WORD


def piece_of(size: int, largest: int) -> int:
    """Bytes of the pieces to cut something into that slots of `largest` bytes carry: a multiple of every element's."""
    return min(largest, max(_LEAST_PIECE, -(-size // (_PIECES * LINE)) * LINE))
