"""The file that `trace_file_path` names: steps are added as they are traced, and a picture is saved beside it.

The format is Chrome's Trace Event Format, which Perfetto and Chrome's `about:tracing` show, with times in microseconds.
A process (`pid`) is a rank; its threads (`tid`) are a lane per stage for computation, a lane of waits for messages, and
a lane of sends, with arrows to the waits that they end.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from nxd_state import Group, all_gather_object, barrier, get_world_group, model_parallel_is_initialized

from nxd_pipeline.runtime.executor import Record
from nxd_pipeline.schedules import (
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    Span,
    Timeline,
    parse_action,
    save_chart,
)
from nxd_pipeline.timeline.traced_step import TracedStep, bubble_report, gather_step

# Limits for a viewer to stay responsive, and for one rank to write between two steps.
MAX_STEPS = 20
MAX_EVENTS = 200_000

# The format has no free colors, only names that a viewer knows; Perfetto colors by the event's name instead.
COLOR_NAMES = {
    ActionKind.FORWARD: "rail_response",
    ActionKind.BACKWARD: "thread_state_running",
    ActionKind.BACKWARD_INPUT: "good",
    ActionKind.BACKWARD_WEIGHT: "thread_state_iowait",
    ActionKind.SEND_ACTIVATION: "generic_work",
    ActionKind.SEND_GRADIENT: "generic_work",
    ActionKind.RECV_ACTIVATION: "terrible",
    ActionKind.RECV_GRADIENT: "terrible",
}
Event = dict[str, Any]


class TraceFile:
    """Traces training steps of all ranks until `MAX_STEPS` steps or `MAX_EVENTS` actions are in the file.

    The first rank of the world rewrites the file atomically after each traced step. The overhead of tracing falls
    between steps, not within them.

    Attributes:
        last_step: the last traced step, on every rank; None before the first.
    """

    def __init__(self, path: str | Path, schedule: Schedule, pipeline: Group) -> None:
        """Called on all ranks of the world, with the same path.

        Args:
            path: path of the JSON file; its folder is created. The picture has the same name with the suffix `.png`.
            schedule: schedule of each pipeline's ranks, including messages.
            pipeline: this rank's pipeline-parallel group.

        Raises:
            ValueError: the first rank cannot write the file; raised on every rank.
        """
        self._path = Path(path)
        self._schedule = schedule
        self._pipeline = pipeline
        self._world = get_world_group() if model_parallel_is_initialized() else Group.solo("world")
        self._origin = perf_counter_ns()
        self._clock_errors: list[float] = []  # of each step traced
        self.last_step: TracedStep | None = None
        self._events: list[str] = []
        problems = all_gather_object(_problem(self._path) if self._world.rank == 0 else None, self._world)
        if problems[0] is not None:
            raise ValueError(problems[0])

    @property
    def is_full(self) -> bool:
        """Whether no more steps are traced."""
        events_per_step = sum(map(len, self._schedule.actions)) * len(self._pipeline.replica_groups)
        num_steps = len(self._clock_errors)
        return num_steps >= MAX_STEPS or num_steps * events_per_step >= MAX_EVENTS

    @contextmanager
    def step(self) -> Iterator[Record | None]:
        """Trace the step that the body runs on all ranks, which begin it together; yields a function for the body.

        The body calls it with each action of this rank, its start and its end by `time.perf_counter_ns()`. None is
        yielded if the file is full. A body that raises adds nothing.
        """
        if self.is_full:
            yield None
            return
        times: dict[Action, tuple[int, int]] = {}

        def record(action: Action, start: int, end: int) -> None:
            times[action] = (start, end)

        barrier(self._world)
        yield record
        self.last_step = gather_step(
            len(self._clock_errors),
            times,
            schedule=self._schedule,
            pipeline=self._pipeline,
            world=self._world,
            origin=self._origin,
        )
        self._clock_errors.append(self.last_step.clock_error)
        if self._world.rank == 0:
            self._write(self.last_step)

    def _write(self, step: TracedStep) -> None:
        """Write the file and the picture; a disk error costs the trace, not the training."""
        if not self._events:
            self._events += [json.dumps(event) for event in lane_names(step)]
        self._events += [json.dumps(event) for event in step_events(step)]
        try:
            _replace(self._path, _document(self._events, trace_facts(step, self._clock_errors)))
            self._draw(step)
        except OSError as error:
            warnings.warn(f"step {step.number} is not in {self._path}: {error}", stacklevel=2)

    def _draw(self, step: TracedStep) -> None:
        picture = self._path.with_suffix(".png")
        temporary = _temporary(picture)
        timeline = step.timelines[0]
        title = f"{timeline.name}, step {step.number}: {bubble_report(timeline).headline}"
        try:
            save_chart(timeline, temporary, lanes="stage", title=title, unit="s")
        except ImportError:
            warnings.warn(f"{picture} needs matplotlib: pip install nxd-pipeline[timeline]", stacklevel=2)
        else:
            os.replace(temporary, picture)


def _problem(path: Path) -> str | None:
    """Return the reason why a file cannot be written; None if it can."""
    advice = "pass a file in a folder where rank 0 may write"
    if path.suffix == ".png":
        return f"trace_file_path={str(path)!r} names a picture; pass a .json file, the picture is saved beside it"
    if path.is_dir():
        return f"trace_file_path={str(path)!r} is a folder; {advice}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        return f"trace_file_path={str(path)!r} cannot be written ({error}); {advice}"
    return None


def _document(events: Sequence[str], facts: Mapping[str, Any]) -> str:
    lines = ",\n".join(events)
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n{lines}\n]}}\n'


def _replace(path: Path, content: str) -> None:
    """Write a file atomically."""
    temporary = _temporary(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _temporary(path: Path) -> Path:
    """Return a path beside the file, with its suffix, for this process only."""
    return path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")


def lane_names(step: TracedStep) -> Iterator[Event]:
    """Yield the metadata events that name ranks and lanes, once per file."""
    for index, (ranks, timeline) in enumerate(zip(step.pipelines, step.timelines, strict=True)):
        waits = _num_stages(timeline)
        for pipeline_rank, (rank, spans) in enumerate(zip(ranks, timeline.spans, strict=True)):
            place = f"rank {rank}: pipeline {index}, pipeline rank {pipeline_rank}"
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": place}}
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
            stages = sorted({span.action.stage for span in spans})
            lanes = {**{stage: f"stage {stage}" for stage in stages}, waits: "waits", waits + 1: "sends"}
            for lane, name in lanes.items():
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}


def step_events(step: TracedStep) -> Iterator[Event]:
    """Yield an event for each action of each rank, and an arrow for each message."""
    for index, (ranks, timeline) in enumerate(zip(step.pipelines, step.timelines, strict=True)):
        num_stages = _num_stages(timeline)
        for rank, spans in zip(ranks, timeline.spans, strict=True):
            for span in spans:
                place = {"pid": rank, "tid": _lane(span.action, num_stages)}
                yield _slice(span, step.number) | place
                if span.action.is_communication:
                    yield _arrow_end(span, f"{step.number}/{index}") | place


def trace_facts(step: TracedStep, clock_errors: Sequence[float]) -> dict[str, Any]:
    """Return the file's `otherData`; `clock_errors` are in seconds, one per step."""
    return {
        "schedule": step.timelines[0].name,
        "pipelines": [list(ranks) for ranks in step.pipelines],
        "clock_errors_in_microseconds": [_microseconds(error) for error in clock_errors],
    }


def read_trace(file: str | Path) -> tuple[TracedStep, ...]:
    """Read the steps in a file written to `trace_file_path`; raises a ValueError for any other file."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        other = content["otherData"]
        pipelines = tuple(tuple(map(int, ranks)) for ranks in other["pipelines"])
        spans: dict[int, dict[int, list[Span]]] = {}  # by step and rank
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                of_step = spans.setdefault(event["args"]["step"], {rank: [] for ranks in pipelines for rank in ranks})
                of_step[event["pid"]].append(_span(event))
        errors = other["clock_errors_in_microseconds"]
        return tuple(
            TracedStep(
                number,
                pipelines,
                tuple(Timeline(other["schedule"], tuple(tuple(of_step[it]) for it in ranks)) for ranks in pipelines),
                clock_error=errors[number] * 1e-6,
            )
            for number, of_step in sorted(spans.items())
        )
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} is not a trace of a pipeline ({type(error).__name__}: {error}); "
            "pass a file that NxDPPModel wrote to trace_file_path"
        ) from error


def _span(event: Event) -> Span:
    start = event["ts"] * 1e-6
    return Span(parse_action(event["args"]["action"]), start, start + event["dur"] * 1e-6)


def _slice(span: Span, step: int) -> Event:
    action = span.action
    return {
        "ph": "X",
        "name": f"{action.kind.label} {action.microbatch}",
        "cat": "message" if action.is_communication else "compute",
        "cname": COLOR_NAMES[action.kind],
        "ts": _microseconds(span.start),
        "dur": _microseconds(span.end - span.start),
        "args": {"action": str(action), "stage": action.stage, "microbatch": action.microbatch, "step": step},
    }


def _arrow_end(span: Span, prefix: str) -> Event:
    """Return one end of a message's arrow, inside its event; both ends have the same `id`."""
    action = span.action
    if action.kind in SENDS:
        end = {"ph": "s", "ts": _microseconds(span.start), "id": f"{prefix}/{action}"}
    else:
        arrival = max(span.start, span.end - 1e-9)  # just before the event's end, which is exclusive
        end = {"ph": "f", "bp": "e", "ts": _microseconds(arrival), "id": f"{prefix}/{action.counterpart()}"}
    return end | {"name": "message", "cat": "message"}


def _lane(action: Action, num_stages: int) -> int:
    if action.kind in RECEIVES:
        return num_stages
    return num_stages + 1 if action.kind in SENDS else action.stage


def _num_stages(timeline: Timeline) -> int:
    return 1 + max(span.action.stage for spans in timeline.spans for span in spans)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
