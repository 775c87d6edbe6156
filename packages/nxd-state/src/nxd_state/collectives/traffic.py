"""Counts the collectives and messages of a block of code on this rank, and the bytes that it sends, by mesh axis.

Bytes are those that a rank sends if a ring carries the collective, whatever the transport does, so that numbers of
different transports can be compared with one another and with those of nxd-plan. Collectives of code under
torch.compile are not counted: that code runs without its Python.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nxd_state.group import Group


@dataclass
class Traffic:
    """What a rank sends along one axis.

    Attributes:
        calls: number of collectives, and of messages sent to one rank.
        sent_bytes: bytes of these; see the module.
    """

    calls: int = 0
    sent_bytes: int = 0


_counts: dict[str, Traffic] | None = None


@contextmanager
def count_traffic() -> Iterator[dict[str, Traffic]]:
    """Count inside the block; the result is filled meanwhile, by axis as `Group.axis` names it ("tp", "dp+cp").

    Raises:
        RuntimeError: an enclosing block already counts.
    """
    global _counts  # noqa: PLW0603 - backward may run in other threads, which a context variable does not reach
    if _counts is not None:
        raise RuntimeError("count_traffic() is already active; use the result of the outer block")
    _counts = {}
    try:
        yield _counts
    finally:
        _counts = None


def is_counted() -> bool:
    """Whether a block counts now."""
    return _counts is not None


def note(name: str, group: Group, num_bytes: int) -> None:
    """Count a collective or message.

    Args:
        name: its name, as a key of the table below.
        group: the process group.
        num_bytes: bytes of this rank's input; of `all_to_all_v` and messages, those that leave this rank.
    """
    if _counts is None:
        return
    others, size = group.size - 1, group.size
    sent = {
        "all_reduce": 2 * num_bytes * others // size,
        "all_reduce_coalesced": 2 * num_bytes * others // size,
        "all_gather": num_bytes * others,
        "all_gather_": num_bytes * others // size,  # its input is the result's memory
        "reduce_scatter": num_bytes * others // size,
        "reduce_scatter_mean": num_bytes * others // size,
        "all_to_all": num_bytes * others // size,
        "all_to_all_v": num_bytes,
        "broadcast": num_bytes * others // size,  # every rank but the last passes it on
        "message": num_bytes,
    }[name]
    traffic = _counts.setdefault(group.axis, Traffic())
    traffic.calls += 1
    traffic.sent_bytes += sent
