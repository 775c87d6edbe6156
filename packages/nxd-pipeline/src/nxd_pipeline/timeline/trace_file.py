"""The file that `trace_file_path` names: steps are added as they are traced, and a picture is saved beside it."""

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
from nxd_pipeline.schedules import Action, Schedule, save_chart
from nxd_pipeline.timeline.bubble import bubble_report
from nxd_pipeline.timeline.chrome_trace import lane_names, step_events, trace_facts
from nxd_pipeline.timeline.traced_step import TracedStep, gather_step

# As much as a viewer still shows fluently, and one rank can write between two steps.
MAX_STEPS = 20
MAX_EVENTS = 200_000


class TraceFile:
    """Traces training steps of all ranks until `MAX_STEPS` of them, or `MAX_EVENTS` actions, are in the file.

    The first rank of the world writes it again after each traced step, in one move, so that a reader finds all of the
    steps before or all of them with the new one. The overhead of tracing falls between steps, not within them.
    """

    def __init__(self, path: str | Path, schedule: Schedule, pipeline: Group) -> None:
        """Called on all ranks of the world, which give the same path.

        Args:
            path: path of the JSON file; its folder is made. The picture has the same name and ends in `.png`.
            schedule: schedule of each pipeline's ranks, including messages.
            pipeline: this rank's pipeline-parallel group.

        Raises:
            ValueError: the first rank cannot write there; raised on every rank.
        """
        self._path = Path(path)
        self._schedule = schedule
        self._pipeline = pipeline
        self._world = get_world_group() if model_parallel_is_initialized() else Group.solo("world")
        self._origin = perf_counter_ns()
        self._clock_errors: list[float] = []  # of each step traced
        self._last_step: TracedStep | None = None
        self._events: list[str] = []
        problems = all_gather_object(_problem(self._path) if self._world.rank == 0 else None, self._world)
        if problems[0] is not None:
            raise ValueError(problems[0])

    @property
    def last_step(self) -> TracedStep | None:
        """The last step that was traced, on every rank; None before the first."""
        return self._last_step

    @property
    def is_full(self) -> bool:
        """Whether no more steps are traced."""
        events_per_step = sum(map(len, self._schedule.actions)) * len(self._pipeline.replica_groups)
        num_steps = len(self._clock_errors)
        return num_steps >= MAX_STEPS or num_steps * events_per_step >= MAX_EVENTS

    @contextmanager
    def step(self) -> Iterator[Record | None]:
        """Traces the step that the body plays, on all ranks, which begin it together; gives what it is to call.

        The body calls it with each action of this rank, its start and its end by `time.perf_counter_ns()`; it is None
        where the file is full. A body that raises adds nothing.
        """
        if self.is_full:
            yield None
            return
        times: dict[Action, tuple[int, int]] = {}

        def record(action: Action, start: int, end: int) -> None:
            times[action] = (start, end)

        barrier(self._world)
        yield record
        self._last_step = gather_step(
            len(self._clock_errors),
            times,
            schedule=self._schedule,
            pipeline=self._pipeline,
            world=self._world,
            origin=self._origin,
        )
        self._clock_errors.append(self._last_step.clock_error)
        if self._world.rank == 0:
            self._write(self._last_step)

    def _write(self, step: TracedStep) -> None:
        """A disk that fails now costs the trace, not the training."""
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
    """Why this file cannot be written; None if it can."""
    advice = "give trace_file_path a file in a folder where rank 0 may write"
    if path.suffix == ".png":
        return f"trace_file_path={str(path)!r} is the name of a picture; give the JSON's, the picture lies beside it"
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
    """Beside the file, with its ending; of this process's own."""
    return path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
