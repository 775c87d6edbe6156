"""One clock for all ranks: how far each one's `time.perf_counter_ns()` is ahead of the first one's.

Processes of one host share that clock; hosts do not.
"""

from dataclasses import dataclass
from time import perf_counter_ns

import torch
from nxd_state import Group, broadcast, recv, send, transport_device
from torch import Tensor

ROUND_TRIPS = 8  # to each rank; the quickest one counts


@dataclass(frozen=True)
class ClockOffset:
    """An estimate of a rank's clock, in nanoseconds.

    Attributes:
        ahead: its reading minus that of the first rank's clock at the same moment.
        error: what the estimate is off by, at most.
    """

    ahead: int
    error: int


def clock_offsets(group: Group) -> tuple[ClockOffset, ...]:
    """The clock of each rank of the group, by group order; called by all of them, which all get the same.

    The method is that of F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989): the
    first rank asks for a reading, takes it for that of the middle of the round trip, which is wrong by half the
    round trip at most, and keeps the best of several tries. Ranks are asked one after the other.
    """
    estimates = torch.zeros(group.size, 2, dtype=torch.int64, device=transport_device(group))
    if group.rank == 0:
        for peer in range(1, group.size):
            best = min((_ask(group, peer) for _ in range(ROUND_TRIPS)), key=lambda estimate: estimate.error)
            estimates[peer, 0], estimates[peer, 1] = best.ahead, best.error
    else:
        for _ in range(ROUND_TRIPS):
            _answer(group)
    shared = broadcast(estimates, group, source=0)
    return tuple(ClockOffset(int(ahead), int(error)) for ahead, error in shared.tolist())


def _ask(group: Group, peer: int) -> ClockOffset:
    start = perf_counter_ns()
    send(_message(group, start), group, destination=peer)
    reading = int(recv(_message(group, 0), group, source=peer))
    end = perf_counter_ns()
    return ClockOffset(ahead=reading - (start + end) // 2, error=(end - start) // 2 + 1)


def _answer(group: Group) -> None:
    recv(_message(group, 0), group, source=0)
    send(_message(group, perf_counter_ns()), group, destination=0)


def _message(group: Group, reading: int) -> Tensor:
    return torch.tensor([reading], device=transport_device(group))
