"""Compares the measured idle time of the ranks in a step with the simulated one of the same actions."""

from dataclasses import dataclass
from statistics import median

from nxd_pipeline.schedules import (
    SENDS,
    ActionKind,
    Costs,
    Edge,
    Schedule,
    StageCost,
    Timeline,
    custom_schedule,
    simulate,
)


@dataclass(frozen=True)
class BubbleReport:
    """The idle part of a step, from the first computation of all ranks to the last; `str` gives a table.

    Idle time beyond the simulated one was lost to messages, to actions that took longer than others of their kind, and
    to the host's work between them; the simulated part is due to the schedule itself.

    Attributes:
        schedule: name of the schedule.
        measured: the idle part of each pipeline rank's time.
        simulated: the same by `simulate`, for `costs` and messages that take no time.
        costs: durations of each stage's actions in seconds, medians over the microbatches.
    """

    schedule: str
    measured: tuple[float, ...]
    simulated: tuple[float, ...]
    costs: tuple[StageCost, ...]

    @property
    def headline(self) -> str:
        """The idle part of all ranks, in words."""
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
    """The report of one pipeline's step, measured by `trace_file_path` or read from its file."""
    costs = measured_costs(timeline)
    simulated = simulate(_played(timeline), Costs(costs), edges=_edges(timeline))
    return BubbleReport(timeline.name, idle_parts(timeline), idle_parts(simulated), costs)


def measured_costs(timeline: Timeline) -> tuple[StageCost, ...]:
    """The measured time of each stage's actions: the median over microbatches for each kind, 0 for kinds it lacks."""
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
    """The part of each rank's time between the first computation of all ranks and the last in which it was idle."""
    busy = (sum(span.end - span.start for span in spans) for spans in timeline.compute_spans)
    return tuple(1 - time / timeline.makespan if timeline.makespan else 0.0 for time in busy)


def _played(timeline: Timeline) -> Schedule:
    return custom_schedule([[span.action for span in spans] for spans in timeline.spans], name=timeline.name)


def _edges(timeline: Timeline) -> list[Edge]:
    """The edges between ranks, which are all that a simulation needs; within a rank the order is known to be right."""
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
