"""Timelines, simulated or measured: when each action of a step started and ended, and how long ranks were idle."""

from dataclasses import dataclass
from functools import cached_property

from nxd_pipeline.schedules.action import Action


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it started and ended; a send or receive ends when its message has arrived."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of every pipeline rank, in the order of its actions; any unit of time, one clock for all ranks."""

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def compute_spans(self) -> tuple[tuple[Span, ...], ...]:
        """The same without sends and receives, which do not keep a rank busy."""
        return tuple(tuple(span for span in spans if not span.action.is_communication) for spans in self.spans)

    @property
    def start(self) -> float:
        """When the first computation starts."""
        return min((span.start for spans in self.compute_spans for span in spans), default=0.0)

    @property
    def makespan(self) -> float:
        """From the start of the first computation to the end of the last."""
        return max((span.end for spans in self.compute_spans for span in spans), default=0.0) - self.start

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time within the makespan in which they did not compute."""
        busy = sum(span.end - span.start for spans in self.compute_spans for span in spans)
        available = self.makespan * len(self.spans)
        return 1 - busy / available if available else 0.0
