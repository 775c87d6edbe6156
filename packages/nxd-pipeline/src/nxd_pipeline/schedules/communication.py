"""Adds the messages that an order of computation needs, in an order that cannot deadlock.

The executor sends the messages. It may do so in any of three ways, and none can deadlock: one after the other, each
blocking until both ends have arrived; neighboring ones as one batch, batches in order; or all without blocking,
matched in order for each pair of ranks. A computation needs its own receives only, and the receive of the next one may
already be posted: an executor that batches should not let the first wait for the second.

`insert_communication` puts a receive before the computation during which its message is sent. Where a receive blocks,
as on XLA, the computation would wait for the message, and 1F1B on eight ranks would take two thirds longer. For such
transports `insert_blocking_communication` places each message at a time when both ranks are free.
"""

from collections.abc import Iterable
from dataclasses import replace

from nxd_pipeline.schedules.edge import Dataflow, Edge
from nxd_pipeline.schedules.schedule import Action, Schedule
from nxd_pipeline.schedules.simulation import Costs, StageCost, simulate

# A message takes a little time, so a rank further on runs a little later, and its receives come up before the
# computation during which the message arrives. Powers of two, for times that are equal to be so on every machine.
EXPECTED_COSTS = Costs(latency=2.0**-6)

_Time = tuple[float, ...]


def insert_communication(schedule: Schedule, edges: Iterable[Edge] | None = None) -> Schedule:
    """Return the schedule with sends right after the computations, and receives before messages can arrive.

    Each rank's actions are ordered by the end times of computations; both ends of a message get the time at which the
    computation of its value ends. So all ranks agree on one order, which rules out deadlock; a receive comes before the
    computation during which its message is sent; and messages of the same time between the same ranks are neighbors.
    Stages on one rank exchange no messages.

    Args:
        schedule: an order of computation; messages in it are replaced.
        edges: edges between stages; by default each stage uses the output of the previous one.

    Raises:
        ValueError: the order waits for something that never arrives.
    """
    computed = schedule.without_communication()
    dataflow = Dataflow(schedule, edges)
    timeline = simulate(computed, EXPECTED_COSTS, edges=dataflow.edges)
    events: list[list[tuple[_Time, Action]]] = [[] for _ in schedule.actions]
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            events[rank].append(((span.end,), span.action))
            for send in dataflow.sends(span.action):
                receive = send.counterpart()
                peer_rank = schedule.rank_of_stage[receive.stage]
                ranks = (min(rank, peer_rank), max(rank, peer_rank))
                time = (span.end, *ranks, send.stage, receive.stage)  # the same for both ends
                events[rank].append((time, send))
                events[peer_rank].append((time, receive))
    ordered = (sorted(row, key=lambda event: event[0]) for row in events)
    return replace(schedule, actions=tuple(tuple(action for _, action in row) for row in ordered))


_COST = StageCost()


def insert_blocking_communication(schedule: Schedule, edges: Iterable[Edge] | None = None) -> Schedule:
    """Return the schedule with each message placed as soon as both its ranks are between two computations.

    The placement follows a simulation in which forward and each half of a backward take 1: a rank that ends a
    computation exchanges all pending messages with ranks that are between two computations, and continues unless its
    next one lacks an input. If computations take the expected time, schedules take no longer than on a transport that
    does not block; `dualpipe-v` takes up to 5% longer. Arguments and errors are those of `insert_communication`.
    """
    computed = schedule.without_communication()
    dataflow = Dataflow(schedule, edges)
    simulate(computed, edges=dataflow.edges)  # raises if the order cannot be executed
    return replace(schedule, actions=_BlockingRanks(computed, dataflow).run())


class _BlockingRanks:
    """Simulates all ranks, with messages that block both ends."""

    def __init__(self, schedule: Schedule, dataflow: Dataflow) -> None:
        self._schedule, self._dataflow = schedule, dataflow
        self._next = [list(reversed(row)) for row in schedule.actions]
        self._computing: dict[int, tuple[float, Action]] = {}  # by rank, with the end time
        self._sends: list[Action] = []  # pending, in the order in which they became possible
        self._received: set[Action] = set()
        self._done: list[list[Action]] = [[] for _ in schedule.actions]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        now = 0.0
        while True:
            self._exchange()
            self._start(now)
            if not self._computing:
                return tuple(map(tuple, self._done))
            now = min(end for end, _ in self._computing.values())
            self._finish(now)

    def _exchange(self) -> None:
        waiting = []
        for send in self._sends:
            receive = send.counterpart()
            ends = [self._schedule.rank_of_stage[action.stage] for action in (send, receive)]
            if any(rank in self._computing for rank in ends):
                waiting.append(send)
                continue
            self._done[ends[0]].append(send)
            self._done[ends[1]].append(receive)
            self._received.add(receive)
        self._sends = waiting

    def _start(self, now: float) -> None:
        for rank, actions in enumerate(self._next):
            if rank in self._computing or not actions:
                continue
            if self._received.issuperset(self._dataflow.receives(actions[-1])):
                action = actions.pop()
                self._computing[rank] = (now + _COST.of(action.kind), action)

    def _finish(self, now: float) -> None:
        for rank, (end, action) in sorted(self._computing.items()):
            if end == now:
                del self._computing[rank]
                self._done[rank].append(action)
                self._sends += self._dataflow.sends(action)
