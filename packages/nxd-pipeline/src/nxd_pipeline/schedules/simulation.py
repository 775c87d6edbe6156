"""Simulates a schedule for given costs: a `Timeline` of when each action starts and ends, and of idle time.

Timelines, simulated or measured, are drawn as text or, with matplotlib, as an image, with a row per pipeline rank.

An order of computation is enough. If the schedule also has messages, they are sent at their sends and arrive once both
ends are ready. Links do not slow one another down.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from nxd_pipeline.schedules.edge import Dataflow, Edge
from nxd_pipeline.schedules.schedule import SENDS, Action, ActionKind, Schedule

COLORS = {
    ActionKind.FORWARD: "#7fb2e5",
    ActionKind.BACKWARD: "#5fae7b",
    ActionKind.BACKWARD_INPUT: "#8ecf9d",
    ActionKind.BACKWARD_WEIGHT: "#f2c879",
}
INK = "#1f2937"


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it started and ended; a send or receive ends when its message has arrived."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of every pipeline rank, in the order of its actions; in any unit of time, on one clock."""

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def compute_spans(self) -> tuple[tuple[Span, ...], ...]:
        """The spans without sends and receives, which do not keep a rank busy."""
        return tuple(tuple(span for span in spans if not span.action.is_communication) for spans in self.spans)

    @property
    def start(self) -> float:
        """Start of the first computation."""
        return min((span.start for spans in self.compute_spans for span in spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the start of the first computation to the end of the last."""
        return max((span.end for spans in self.compute_spans for span in spans), default=0.0) - self.start

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time within the makespan in which they did not compute."""
        busy = sum(span.end - span.start for spans in self.compute_spans for span in spans)
        available = self.makespan * len(self.spans)
        return 1 - busy / available if available else 0.0


@dataclass(frozen=True)
class StageCost:
    """The cost of one microbatch on one stage; any unit of time, the same for all.

    Attributes:
        forward: time of a forward.
        backward_input: time of the gradients of the stage's inputs.
        backward_weight: time of the gradients of its weights.
        backward: time of a whole backward; None for the sum of its halves.
        output_bytes: size of the message to each later stage, and of its gradient.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    backward: float | None = None
    output_bytes: int = 0

    def of(self, kind: ActionKind) -> float:
        """Return the time of a computation."""
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD_INPUT:
            return self.backward_input
        if kind is ActionKind.BACKWARD_WEIGHT:
            return self.backward_weight
        return self.backward_input + self.backward_weight if self.backward is None else self.backward


@dataclass(frozen=True)
class Costs:
    """The costs of each stage, and of messages between ranks.

    Attributes:
        stages: one cost for all stages, or one per stage.
        latency: time of an empty message.
        bytes_per_time: bandwidth; a message takes `latency + output_bytes / bytes_per_time`.
    """

    stages: StageCost | tuple[StageCost, ...] = StageCost()
    latency: float = 0.0
    bytes_per_time: float = math.inf

    def per_stage(self, num_stages: int) -> tuple[StageCost, ...]:
        """Return one cost for each stage.

        Raises:
            ValueError: there is another number of costs.
        """
        if isinstance(self.stages, StageCost):
            return (self.stages,) * num_stages
        if len(self.stages) != num_stages:
            raise ValueError(
                f"{len(self.stages)} costs for a schedule of {num_stages} stages; pass one for each, or one for all"
            )
        return self.stages


def simulate(schedule: Schedule, costs: Costs | None = None, *, edges: Iterable[Edge] | None = None) -> Timeline:
    """Return the start and end of every action, each as early as its rank's order and its inputs allow.

    Args:
        schedule: with or without messages; see `insert_communication`.
        costs: the costs; by default forward and each half of a backward take 1, and messages no time.
        edges: edges between stages; by default each stage uses the output of the previous one.

    Raises:
        ValueError: the order waits for something that never arrives, or there is a wrong number of costs.
    """
    return _Simulation(schedule, costs or Costs(), Dataflow(schedule, edges)).run()


class _Simulation:
    """Advances a rank until it waits for a message, and again once that message is sent."""

    def __init__(self, schedule: Schedule, costs: Costs, dataflow: Dataflow) -> None:
        self._schedule = schedule
        self._dataflow = dataflow
        self._costs = costs.per_stage(schedule.num_stages)
        self._transit = [costs.latency + cost.output_bytes / costs.bytes_per_time for cost in self._costs]
        self._with_messages = schedule.has_communication
        self._clock = [0.0] * schedule.num_ranks
        self._computed: dict[Action, Span] = {}
        self._sent: dict[Action, float] = {}  # by the receive that takes the message
        self._posted: dict[Action, float] = {}
        self._waiting: dict[Action, int] = {}  # ranks, by the receive whose message they wait for
        self._positions = [0] * schedule.num_ranks

    def run(self) -> Timeline:
        ranks = list(range(self._schedule.num_ranks))
        while ranks:
            ranks += self._advance(ranks.pop())
        if self._waiting:
            raise ValueError(self._stuck())
        spans = tuple(tuple(map(self._span, actions)) for actions in self._schedule.actions)
        return Timeline(self._schedule.name, spans)

    def _advance(self, rank: int) -> list[int]:
        """Run a rank's actions until one has to wait; returns the ranks that can continue."""
        woken: list[int] = []
        actions = self._schedule.actions[rank]
        while self._positions[rank] < len(actions):
            action = actions[self._positions[rank]]
            if action.kind in SENDS:
                self._send(action.counterpart(), self._clock[rank], woken)
            elif action.peer is not None:
                self._posted[action] = self._clock[rank]
            elif not self._compute(rank, action, woken):
                break
            self._positions[rank] += 1
        return woken

    def _compute(self, rank: int, action: Action, woken: list[int]) -> bool:
        """Compute an action if its inputs arrive; returns whether it did."""
        for choice in self._dataflow.local_inputs(action):
            if not any(needed in self._computed for needed in choice):
                raise ValueError(f"{self._where(rank)}: {' or '.join(map(str, choice))} has to come before it")
        start = self._clock[rank]
        for receive in self._dataflow.receives(action):
            if self._with_messages and receive not in self._posted:
                raise ValueError(f"{self._where(rank)}: {receive} has to come before it")
            if receive not in self._sent:
                self._waiting[receive] = rank
                return False
            start = max(start, self._arrival(receive))
        self._clock[rank] = end = start + self._costs[action.stage].of(action.kind)
        self._computed[action] = Span(action, start, end)
        if not self._with_messages:
            for send in self._dataflow.sends(action):
                self._send(send.counterpart(), end, woken)
        return True

    def _send(self, receive: Action, time: float, woken: list[int]) -> None:
        self._sent[receive] = time
        if receive in self._waiting:
            woken.append(self._waiting.pop(receive))

    def _arrival(self, receive: Action) -> float:
        producer = min(receive.stage, receive.counterpart().stage)  # a gradient is as large as its value
        return max(self._sent[receive], self._posted.get(receive, 0.0)) + self._transit[producer]

    def _span(self, action: Action) -> Span:
        if action.peer is None:
            return self._computed[action]
        if action.kind in SENDS:
            receive = action.counterpart()
            if receive not in self._posted:
                raise ValueError(f"schedule {self._schedule.name!r}: no rank receives {action}; {receive} is missing")
            return Span(action, self._sent[receive], self._arrival(receive))
        if action not in self._sent:
            raise ValueError(
                f"schedule {self._schedule.name!r}: no rank sends {action}; {action.counterpart()} is missing"
            )
        return Span(action, self._posted[action], self._arrival(action))

    def _where(self, rank: int) -> str:
        return self._schedule.where(rank, self._positions[rank])

    def _stuck(self) -> str:
        waiting = sorted((rank, str(receive)) for receive, rank in self._waiting.items())
        places = "; ".join(f"{self._where(rank)} waits for {receive}" for rank, receive in waiting)
        return f"{places}: what they wait for comes after them or is missing"


def text_chart(timeline: Timeline, *, columns: int = 100) -> str:
    """Draw a line per rank: kind and microbatch of each computation from its start to its end, dots for idle time.

    Computations that are too short for their text are cut; pass more `columns` then. If a rank has several stages,
    those in the first half of the pipeline are in capitals and the others in small letters.
    """
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    num_stages = 1 + max((span.action.stage for spans in timeline.compute_spans for span in spans), default=0)
    lines = []
    for rank, spans in enumerate(timeline.compute_spans):
        line = ["."] * columns
        for span in spans:
            start, end = (round((time - timeline.start) * scale) for time in (span.start, span.end))
            first_half = 2 * span.action.stage < num_stages or num_stages == len(timeline.spans)
            kind = span.action.kind if first_half else span.action.kind.lower()
            line[start:end] = f"{kind}{span.action.microbatch}".ljust(end - start, "-")[: end - start]
        lines.append(f"rank {rank:<3}|{''.join(line)}|\n")
    return "".join(lines)


def save_chart(
    timeline: Timeline,
    file: str | Path,
    *,
    lanes: Literal["rank", "stage"] = "rank",
    title: str | None = None,
    unit: str = "",
) -> Path:
    """Save an image of the timeline, in the format of the file's suffix; later stages of a rank are paler.

    Args:
        timeline: a simulated or measured timeline.
        file: path of the image; an existing file is replaced.
        lanes: "rank" for a row per rank, or "stage" for a row per stage.
        title: title; the timeline's name and idle time if None.
        unit: unit of the times.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional package)
        from matplotlib.patches import Patch  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures of schedules need matplotlib: pip install nxd-pipeline[plot]") from error
    places = {  # row and opacity of each stage
        stage: (rank, 1 - 0.5 * index / len(stages))
        for rank, spans in enumerate(timeline.compute_spans)
        for stages in [sorted({span.action.stage for span in spans})]
        for index, stage in enumerate(stages)
    }
    labels = [f"rank {rank}" for rank in range(len(timeline.spans))]
    if lanes == "stage":
        labels = [f"rank {rank}, stage {stage}" for stage, (rank, _) in places.items()]
        places = {stage: (row, opacity) for row, (stage, (_, opacity)) in enumerate(places.items())}
    figure = Figure(figsize=(14, 1.2 + 0.5 * len(labels)), layout="constrained")
    axes = figure.subplots()
    bars: dict[tuple[int, ActionKind], list[tuple[float, float]]] = {}  # by stage and kind, for speed
    for span in (span for spans in timeline.compute_spans for span in spans):
        start, duration = span.start - timeline.start, span.end - span.start
        bars.setdefault((span.action.stage, span.action.kind), []).append((start, duration))
        if duration > timeline.makespan / 100:
            middle, (row, _), label = start + duration / 2, places[span.action.stage], str(span.action.microbatch)
            axes.text(middle, row, label, ha="center", va="center", fontsize=7, color=INK)
    for (stage, kind), extents in bars.items():
        row, opacity = places[stage]
        color = (COLORS[kind], opacity)
        axes.broken_barh(extents, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.5)
    axes.set(xlabel=f"time, {unit}" if unit else "time", yticks=range(len(labels)), yticklabels=labels)
    axes.set_title(title or f"{timeline.name}: {timeline.bubble_fraction:.1%} of the time idle", color=INK)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    kinds = {kind for _, kind in bars}
    legend = [Patch(color=COLORS[kind], label=kind.label) for kind in COLORS if kind in kinds]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(file, dpi=150)
    return Path(file)
