"""The data of one traced training step, and its gathering from all ranks.

All ranks know the schedule, so only times are sent: a start and an end for each of a rank's actions. Times are read
from one clock: `time.perf_counter_ns()` of the first rank. Processes on one host share that clock; for other hosts,
`clock_offsets` measures the difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from nxd_state import Group, all_gather, broadcast, recv, send, transport_device
from torch import Tensor

from nxd_pipeline.schedules import Action, Schedule, Span, Timeline

ROUND_TRIPS = 8  # to each rank; the quickest one counts


@dataclass(frozen=True)
class ClockOffset:
    """An estimate of a rank's clock, in nanoseconds.

    Attributes:
        ahead: its reading minus that of the first rank's clock at the same moment.
        error: maximum error of the estimate.
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


Times = Mapping[Action, tuple[int, int]]  # start and end by this process's `time.perf_counter_ns()`


@dataclass(frozen=True)
class TracedStep:
    """One training step of all pipelines, in seconds since the trace began, by the clock of the first rank.

    The span of a computation is the time for which it computed; that of a send the time that it took to hand the
    message over; and that of a receive the time for which the computation that needs it waited for it.

    Attributes:
        number: number of the step among those traced, from 0.
        pipelines: the global ranks of each pipeline, by pipeline-parallel rank.
        timelines: one per pipeline.
        clock_error: maximum error between times of different ranks, in seconds.
    """

    number: int
    pipelines: tuple[tuple[int, ...], ...]
    timelines: tuple[Timeline, ...]
    clock_error: float


def gather_step(
    number: int, times: Times, *, schedule: Schedule, pipeline: Group, world: Group, origin: int
) -> TracedStep:
    """The step from what each rank recorded of it; called by all ranks of the world, which all get the same.

    Args:
        number: number of the step.
        times: times of every action of this rank.
        schedule: actions that the ranks of every pipeline executed.
        pipeline: this rank's pipeline-parallel group.
        world: all ranks.
        origin: when the trace began, by the first rank's clock; that of other ranks does not count.
    """
    offsets = clock_offsets(world)
    ahead = offsets[world.rank].ahead
    actions = schedule.actions[pipeline.rank]
    # [actions of the busiest rank + 1, start and end]; the first row is the origin
    mine = torch.zeros(max(map(len, schedule.actions)) + 1, 2, dtype=torch.int64)
    mine[0] = origin
    mine[1 : len(actions) + 1] = torch.tensor([times[action] for action in actions]) - ahead
    gathered = all_gather(mine.unsqueeze(0).to(transport_device(world)), world).cpu()
    since_origin: list[list[list[int]]] = (gathered[:, 1:] - gathered[0, 0]).tolist()
    of_rank = dict(zip(world.ranks, since_origin, strict=True))
    timelines = tuple(
        Timeline(schedule.name, tuple(map(_spans, schedule.actions, (of_rank[rank] for rank in ranks))))
        for ranks in pipeline.replica_groups
    )
    error = max(offset.error for offset in offsets)
    return TracedStep(number, pipeline.replica_groups, timelines, error * 1e-9)


def _spans(actions: Sequence[Action], times: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    pairs = zip(actions, times[: len(actions)], strict=True)
    return tuple(Span(action, start * 1e-9, end * 1e-9) for action, (start, end) in pairs)
