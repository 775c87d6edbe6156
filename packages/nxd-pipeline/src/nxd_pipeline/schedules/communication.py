"""Adds to an order of computation the messages that it needs, in an order that cannot deadlock.

The executor sends the messages. It may do so in any of three ways, and none can deadlock: one after the other, each
blocking until both ends have arrived; neighbouring ones as one batch, batches in order; or all without blocking,
matched in order for each pair of ranks. A computation needs its own receives only, and the receive of the next one may
already be posted: an executor that batches should not let the first wait for the second.
"""

from collections.abc import Iterable
from dataclasses import replace

from nxd_pipeline.schedules.action import Action
from nxd_pipeline.schedules.edge import Dataflow, Edge
from nxd_pipeline.schedules.schedule import Schedule
from nxd_pipeline.schedules.simulation import Costs, simulate

# A message takes a little time, so a rank further on runs a little later, and its receives come up before the
# computation during which the message arrives. Powers of two, for times that are equal to be so on every machine.
EXPECTED_COSTS = Costs(latency=2.0**-6)

_Time = tuple[float, ...]


def insert_communication(schedule: Schedule, edges: Iterable[Edge] | None = None) -> Schedule:
    """The schedule with sends right after the computations that make the values, and receives before they can arrive.

    Each rank's actions are ordered by when computations end, and a message has the time at which the computation that
    makes it ends, at both of its ends. So all ranks agree on one order of everything, which rules out deadlock; a
    receive stands before the computation during which its message is sent; and messages of the same time between the
    same ranks are neighbours. Stages on one rank exchange none.

    Args:
        schedule: an order of computation; messages in it are replaced.
        edges: who uses whose output; each stage that of the one before it, by default.

    Raises:
        ValueError: the order waits for something that never comes.
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
