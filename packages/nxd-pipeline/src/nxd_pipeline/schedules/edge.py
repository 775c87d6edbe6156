"""The edges between stages: which stage uses values of which other stage, and what each computation waits for.

Partitioning decides the edges of a model; a chain is the default. Values may skip stages, and need no gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from nxd_pipeline.schedules.schedule import MAKES_GRADIENT, RECEIVES, Action, ActionKind, Schedule


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
        self._rank_of_stage = schedule.rank_of_stage
        self._producers: list[list[int]] = [[] for _ in schedule.rank_of_stage]
        self._consumers: list[list[int]] = [[] for _ in schedule.rank_of_stage]
        self._gradient_from: list[list[int]] = [[] for _ in schedule.rank_of_stage]
        self._gradient_to: list[list[int]] = [[] for _ in schedule.rank_of_stage]
        for edge in self.edges:
            self._producers[edge.consumer].append(edge.producer)
            self._consumers[edge.producer].append(edge.consumer)
            if edge.needs_gradient:
                self._gradient_from[edge.producer].append(edge.consumer)
                self._gradient_to[edge.consumer].append(edge.producer)

    @property
    def crosses_ranks(self) -> bool:
        """Whether any value has to be sent."""
        return any(not self._on_one_rank(edge.producer, edge.consumer) for edge in self.edges)

    def local_inputs(self, action: Action) -> list[tuple[Action, ...]]:
        """Return what must be computed on the same rank before `action`: one action of each tuple."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        forward = (Action(ActionKind.FORWARD, stage, microbatch),)
        if kind is ActionKind.FORWARD:
            producers = (source for source in self._producers[stage] if self._on_one_rank(source, stage))
            return [(Action(ActionKind.FORWARD, source, microbatch),) for source in producers]
        if kind is ActionKind.SEND_ACTIVATION:
            return [forward]
        if kind is ActionKind.SEND_GRADIENT:
            return [backwards(stage, microbatch)]
        if kind in RECEIVES:
            return []
        if kind is ActionKind.BACKWARD_WEIGHT:
            return [(Action(ActionKind.BACKWARD_INPUT, stage, microbatch),)]
        gradients = (source for source in self._gradient_from[stage] if self._on_one_rank(source, stage))
        return [forward, *(backwards(source, microbatch) for source in gradients)]

    def receives(self, action: Action) -> list[Action]:
        """Return the messages that a computation needs."""
        if action.kind is ActionKind.FORWARD:
            return self._messages(ActionKind.RECV_ACTIVATION, action, self._producers)
        if action.kind in MAKES_GRADIENT:
            return self._messages(ActionKind.RECV_GRADIENT, action, self._gradient_from)
        return []

    def sends(self, action: Action) -> list[Action]:
        """Return the messages that send the results of a computation."""
        if action.kind is ActionKind.FORWARD:
            return self._messages(ActionKind.SEND_ACTIVATION, action, self._consumers)
        if action.kind in MAKES_GRADIENT:
            return self._messages(ActionKind.SEND_GRADIENT, action, self._gradient_to)
        return []

    def carries(self, message: Action) -> bool:
        """Whether an edge between two ranks requires this send or receive."""
        ends = {
            ActionKind.SEND_ACTIVATION: self._consumers,
            ActionKind.RECV_ACTIVATION: self._producers,
            ActionKind.SEND_GRADIENT: self._gradient_to,
            ActionKind.RECV_GRADIENT: self._gradient_from,
        }[message.kind][message.stage]
        return message.peer in ends and not self._on_one_rank(message.stage, message.peer)

    def _messages(self, kind: ActionKind, action: Action, ends: list[list[int]]) -> list[Action]:
        others = (end for end in ends[action.stage] if not self._on_one_rank(end, action.stage))
        return [Action(kind, action.stage, action.microbatch, other) for other in others]

    def _on_one_rank(self, stage: int, other: int) -> bool:
        return self._rank_of_stage[stage] == self._rank_of_stage[other]


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
