"""The edges between stages: which stage uses values of which other stage, and what each computation waits for.

Partitioning decides the edges of a model; a chain is the default. Values may skip stages, and need no gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from nxd_pipeline.schedules.schedule import COMMUNICATION, MAKES_GRADIENT, RECEIVES, Action, ActionKind, Schedule


@dataclass(frozen=True, slots=True)
class Edge:
    """Stage `consumer` uses values of stage `producer`; gradients are sent back if any of the values needs one."""

    producer: int
    consumer: int
    needs_gradient: bool = True


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a model in which each stage uses the output of the previous one."""
    return tuple(Edge(stage, stage + 1) for stage in range(num_stages - 1))


class Dataflow:
    """The inputs and consumers of each action of a schedule, given the edges between its stages.

    Attributes:
        edges: the edges of the model, sorted.
    """

    def __init__(self, schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
        self.edges: tuple[Edge, ...] = chain(schedule.num_stages) if edges is None else _checked(schedule, edges)
        # By stage: stages on the same rank whose forward or backward comes first.
        self._local_producers: list[list[int]] = [[] for _ in schedule.rank_of_stage]
        self._local_consumers: list[list[int]] = [[] for _ in schedule.rank_of_stage]
        # By kind of message and by stage: the stages at the other end, on other ranks.
        self._peers: dict[ActionKind, list[list[int]]] = {
            kind: [[] for _ in schedule.rank_of_stage] for kind in COMMUNICATION
        }
        for producer, consumer, needs_gradient in ((it.producer, it.consumer, it.needs_gradient) for it in self.edges):
            if schedule.rank_of_stage[producer] != schedule.rank_of_stage[consumer]:
                self._peers[ActionKind.SEND_ACTIVATION][producer].append(consumer)
                self._peers[ActionKind.RECV_ACTIVATION][consumer].append(producer)
                if needs_gradient:
                    self._peers[ActionKind.SEND_GRADIENT][consumer].append(producer)
                    self._peers[ActionKind.RECV_GRADIENT][producer].append(consumer)
                continue
            self._local_producers[consumer].append(producer)
            if needs_gradient:
                self._local_consumers[producer].append(consumer)

    @property
    def crosses_ranks(self) -> bool:
        """Whether any value has to be sent."""
        return any(self._peers[ActionKind.SEND_ACTIVATION])

    def local_inputs(self, action: Action) -> list[tuple[Action, ...]]:
        """Return what must be computed on the same rank before `action`: one action of each tuple."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        forward = (Action(ActionKind.FORWARD, stage, microbatch),)
        if kind is ActionKind.FORWARD:
            return [(Action(ActionKind.FORWARD, source, microbatch),) for source in self._local_producers[stage]]
        if kind is ActionKind.SEND_ACTIVATION:
            return [forward]
        if kind is ActionKind.SEND_GRADIENT:
            return [backwards(stage, microbatch)]
        if kind in RECEIVES:
            return []
        if kind is ActionKind.BACKWARD_WEIGHT:
            return [(Action(ActionKind.BACKWARD_INPUT, stage, microbatch),)]
        return [forward, *(backwards(source, microbatch) for source in self._local_consumers[stage])]

    def receives(self, action: Action) -> list[Action]:
        """Return the messages that a computation needs."""
        return self._messages(action, ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT)

    def sends(self, action: Action) -> list[Action]:
        """Return the messages that send the results of a computation."""
        return self._messages(action, ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)

    def carries(self, message: Action) -> bool:
        """Whether an edge between two ranks requires this send or receive."""
        return message.peer in self._peers[message.kind][message.stage]

    def _messages(self, action: Action, of_forward: ActionKind, of_backward: ActionKind) -> list[Action]:
        if action.kind is not ActionKind.FORWARD and action.kind not in MAKES_GRADIENT:
            return []
        kind = of_forward if action.kind is ActionKind.FORWARD else of_backward
        return [Action(kind, action.stage, action.microbatch, peer) for peer in self._peers[kind][action.stage]]


def backwards(stage: int, microbatch: int) -> tuple[Action, Action]:
    """Return the two actions that compute the gradients of a stage's inputs; a schedule has one of them."""
    return (
        Action(ActionKind.BACKWARD, stage, microbatch),
        Action(ActionKind.BACKWARD_INPUT, stage, microbatch),
    )


def _checked(schedule: Schedule, edges: Iterable[Edge]) -> tuple[Edge, ...]:
    ordered = tuple(sorted(edges, key=lambda edge: (edge.producer, edge.consumer)))
    for edge in ordered:
        if not 0 <= edge.producer < edge.consumer < schedule.num_stages:
            raise ValueError(
                f"{edge}: schedule {schedule.name!r} has stages 0 to {schedule.num_stages - 1}, and a stage can only "
                "use values of earlier stages"
            )
    for edge, following in pairwise(ordered):
        if (edge.producer, edge.consumer) == (following.producer, following.consumer):
            raise ValueError(f"{edge} and {following}: pass one edge per pair of stages; it carries all their values")
    return ordered
