"""Events of a script on a timeline: what began and ended when, on every rank of the pipeline, for Perfetto.

`NxDPPModel(trace_file_path=...)` records its own steps (nxd_pipeline.timeline); this is for a script's own events.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from time import time_ns

from nxd_state import all_gather_object, get_group, model_parallel_is_initialized


@dataclass
class Event:
    """Something that took time on a rank; times in microseconds since 1970, -1 where it has not begun or ended."""

    label: str
    rank: int
    start: float = -1
    end: float = -1


class Timeline(ABC):
    """Collects events between `mark_event_start` and `mark_event_end`, and writes those of all ranks at a step's end.

    The file is a Chrome trace (a JSON array whose end may be missing), which Perfetto shows.

    Args:
        trace_file_path: where to append; None records nothing.
        rank: this rank, which the events are shown under; rank 0 writes.
    """

    def __init__(self, trace_file_path: str | Path | None, rank: int) -> None:
        self.trace_file_path = trace_file_path
        self.rank = rank
        self.step = 0
        self.enabled = trace_file_path is not None
        self.current_rank_events: dict[str, Event] = {}
        self.all_rank_events: list[dict[str, Event]] | None = None
        if self.should_record and rank == 0:
            self._append("[\n")

    @property
    @abstractmethod
    def should_record(self) -> bool:
        """Whether this rank takes part."""

    @abstractmethod
    def _collect_events_for_all_ranks(self) -> None:
        """Set `all_rank_events`; called by all ranks that record."""

    def mark_event_start(self, label: str) -> None:
        """An event begins.

        Raises:
            ValueError: one of this label has begun in this step.
        """
        if not self.should_record:
            return
        if label in self.current_rank_events:
            raise ValueError(f"event {label!r} has begun already in step {self.step}; give each event its own label")
        self.current_rank_events[label] = Event(label, self.rank, start=time_ns() / 1000)

    def mark_event_end(self, label: str) -> None:
        """An event ends.

        Raises:
            ValueError: it has not begun.
        """
        if not self.should_record:
            return
        if label not in self.current_rank_events:
            raise ValueError(f"event {label!r} has not begun in step {self.step}; call mark_event_start before")
        event = self.current_rank_events[label]
        self.current_rank_events[label] = replace(event, end=time_ns() / 1000)

    def mark_step_end(self) -> None:
        """Write the step's events. Called by all ranks that record, with all events ended."""
        if not self.should_record:
            return
        self._collect_events_for_all_ranks()
        if self.rank == 0:
            events = [event for of_rank in self.all_rank_events or () for event in of_rank.values()]
            self._append("".join(json.dumps(line) + ",\n" for event in events for line in _begin_and_end(event)))
        self.current_rank_events = {}
        self.all_rank_events = None
        self.step += 1

    def _append(self, text: str) -> None:
        if self.trace_file_path is not None:
            with Path(self.trace_file_path).open("a", encoding="utf-8") as file:
                file.write(text)


class PPTimeline(Timeline):
    """The timeline of a pipeline's ranks: those of the first replica and tensor-parallel rank record.

    Args:
        trace_file_path: as for `Timeline`.
        pp_rank: this rank's place in the pipeline.
    """

    def __init__(self, trace_file_path: str | Path | None, pp_rank: int) -> None:
        super().__init__(trace_file_path, pp_rank)

    @property
    def should_record(self) -> bool:
        """Whether there is a file, and this is such a rank."""
        return self.enabled and model_parallel_is_initialized() and not (get_group("dp").rank or get_group("tp").rank)

    def _collect_events_for_all_ranks(self) -> None:
        self.all_rank_events = all_gather_object(self.current_rank_events, get_group("pp"))


def _begin_and_end(event: Event) -> list[dict[str, str | int | float]]:
    return [
        {"cat": "comp", "ph": phase, "name": event.label, "ts": at, "tid": 0, "pid": event.rank}
        for phase, at in (("B", event.start), ("E", event.end))
    ]
