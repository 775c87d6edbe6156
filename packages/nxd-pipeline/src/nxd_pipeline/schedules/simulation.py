"""Simulates a schedule for given costs: a `Timeline` of when each action starts and ends, and of idle time.

An order of computation is enough. If the schedule also has messages, they are sent at their sends and arrive once both
ends are ready. Links do not slow one another down.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from nxd_pipeline.schedules.edge import Dataflow, Edge
from nxd_pipeline.schedules.schedule import SENDS, Action, ActionKind, Schedule


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
