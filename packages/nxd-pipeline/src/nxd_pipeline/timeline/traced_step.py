"""One traced training step: gathered from all ranks, and its idle time compared with the simulated one.

All ranks know the schedule, so only times are sent: the start and end of each action. All times are on one clock,
`time.perf_counter_ns()` of the first rank. Processes on one host share that clock; for other hosts, `clock_offsets`
measures the difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch
from nxd_state import Group, all_gather, broadcast, recv, send, transport_device
from torch import Tensor

from nxd_pipeline.schedules import (
    SENDS,
    Action,
    ActionKind,
    Costs,
    Edge,
    Schedule,
    Span,
    StageCost,
    Timeline,
    custom_schedule,
    simulate,
)

ROUND_TRIPS = 8  # per rank; the quickest one counts


@dataclass(frozen=True)
class ClockOffset:
    """An estimate of a rank's clock, in nanoseconds.

    Attributes:
        ahead: difference to the first rank's clock.
        error: maximum error of the estimate.
    """

    ahead: int
    error: int


def clock_offsets(group: Group) -> tuple[ClockOffset, ...]:
    """Estimate the clock of each rank, in group order. Called by all ranks, which all get the same result.

    The method is that of F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989): the first
    rank asks for a reading and assigns it to the middle of the round trip, with an error of at most half the round
    trip. The best of several tries counts. Ranks are asked one after the other.
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
    """One training step of all pipelines, in seconds since the trace began, on the clock of the first rank.

    The span of a send is the time that it took to start sending; the span of a receive is the time that the computation
    that needs the message waited for it.

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
    """Gather a step from the times that each rank recorded. Called by all ranks, which all get the same result.

    Args:
        number: number of the step.
        times: start and end of every action of this rank.
        schedule: actions that the ranks of every pipeline executed.
        pipeline: this rank's pipeline-parallel group.
        world: all ranks.
        origin: start of the trace; only the first rank's value counts.
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


@dataclass(frozen=True)
class BubbleReport:
    """The idle fraction of a step, from the first computation of all ranks to the last; `str()` formats a table.

    The simulated idle time is due to the schedule. The rest was lost to messages, to actions that took longer than
    others of their kind, and to the host's work between them.

    Attributes:
        schedule: name of the schedule.
        measured: measured idle fraction of each pipeline rank.
        simulated: idle fraction by `simulate`, with `costs` and messages that take no time.
        costs: durations of each stage's actions in seconds, medians over the microbatches.
    """

    schedule: str
    measured: tuple[float, ...]
    simulated: tuple[float, ...]
    costs: tuple[StageCost, ...]

    @property
    def headline(self) -> str:
        """The mean idle fraction, in words."""
        return f"{_mean(self.measured):.1%} of the time idle as measured, {_mean(self.simulated):.1%} as simulated"

    def __str__(self) -> str:
        lines = [
            f"{self.schedule}: {self.headline}",
            f"{'pipeline rank':15}{'measured':>12}{'simulated':>12}",
        ]
        for rank, (measured, simulated) in enumerate(zip(self.measured, self.simulated, strict=True)):
            lines.append(f"{rank:<15}{measured:>12.1%}{simulated:>12.1%}")
        lines.append(f"{'ms of stage':15}{'forward':>12}{'backward':>12}{'of inputs':>12}{'of weights':>12}")
        for stage, cost in enumerate(self.costs):
            times = (cost.forward, cost.backward or 0.0, cost.backward_input, cost.backward_weight)
            lines.append(f"{stage:<15}" + "".join(f"{time * 1e3:>12.3f}" if time else f"{'-':>12}" for time in times))
        return "\n".join(lines)


def bubble_report(timeline: Timeline) -> BubbleReport:
    """Return the report of one pipeline's step, measured by `trace_file_path` or read from its file."""
    costs = measured_costs(timeline)
    executed = custom_schedule([[span.action for span in spans] for spans in timeline.spans], name=timeline.name)
    simulated = simulate(executed, Costs(costs), edges=_edges(timeline))
    return BubbleReport(timeline.name, idle_parts(timeline), idle_parts(simulated), costs)


def measured_costs(timeline: Timeline) -> tuple[StageCost, ...]:
    """Return the measured time of each stage's actions: the median over microbatches by kind, 0 for missing kinds."""
    times: dict[tuple[int, ActionKind], list[float]] = {}
    for spans in timeline.compute_spans:
        for span in spans:
            times.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)
    of_kind = {key: median(durations) for key, durations in times.items()}
    return tuple(
        StageCost(
            forward=of_kind.get((stage, ActionKind.FORWARD), 0.0),
            backward_input=of_kind.get((stage, ActionKind.BACKWARD_INPUT), 0.0),
            backward_weight=of_kind.get((stage, ActionKind.BACKWARD_WEIGHT), 0.0),
            backward=of_kind.get((stage, ActionKind.BACKWARD)),
        )
        for stage in range(1 + max(stage for stage, _ in of_kind))
    )


def idle_parts(timeline: Timeline) -> tuple[float, ...]:
    """Return the fraction of the time from the first computation to the last in which each rank was idle."""
    busy = (sum(span.end - span.start for span in spans) for spans in timeline.compute_spans)
    return tuple(1 - time / timeline.makespan if timeline.makespan else 0.0 for time in busy)


def _edges(timeline: Timeline) -> list[Edge]:
    """Return the edges between ranks, which suffice for a simulation: within a rank the order is known to be right."""
    sends = {span.action for spans in timeline.spans for span in spans if span.action.kind in SENDS}
    forward = {(it.stage, it.peer) for it in sends if it.kind is ActionKind.SEND_ACTIVATION}
    backward = {(it.peer, it.stage) for it in sends if it.kind is ActionKind.SEND_GRADIENT}
    return [
        Edge(producer, consumer, needs_gradient=(producer, consumer) in backward)
        for producer, consumer in sorted(forward)
        if consumer is not None
    ]


def _mean(parts: tuple[float, ...]) -> float:
    return sum(parts) / len(parts)
