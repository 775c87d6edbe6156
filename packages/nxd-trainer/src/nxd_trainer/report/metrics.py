"""The metrics of a run: metrics.jsonl, with a `StepRecord` as a line for each logged step.

Pictures and summaries are made from these records; `trackers` also sends them elsewhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The state of a run after one optimizer step."""

    step: int  # optimizer steps taken, from 1
    loss: float  # mean training loss of the step, over all ranks
    learning_rate: float
    tokens: int  # tokens that the loss has counted since the run began
    tokens_per_second: float  # tokens read over all ranks, without padding, since the previous record
    seconds: float  # since this invocation began
    peak_memory_bytes: int  # of the process or device of the rank that writes metrics
    tokens_seen: int | None = None  # tokens read since the run began, without padding; None in old records
    throughput: float | None = None  # sequences per second, as scripts for NeuronX Distributed count
    grad_norm: float | None = None  # before clipping; None without clipping
    loss_scale: float | None = None  # None without loss scaling
    skipped_steps: int | None = None  # steps skipped since the run began; None without loss scaling
    held_out_loss: float | None = None  # None if the step ended without an evaluation
    aux_loss: float | None = None  # load-balancing part of the loss; None without it
    z_loss: float | None = None  # router z-loss part of the loss; None without it
    tokens_per_expert: Sequence[Sequence[int]] | None = None  # by layer; None without experts
    straggler: str | None = None  # such as "stage 1" or "rank 3 (stage 1, replica 0)"; None if there is none
    slowdown: float | None = None  # the straggler's compute time relative to the median rank
    layout: str | None = None  # "TP 2 x DP 2": in the first record of each invocation
    resumed_from: int | None = None  # step of the checkpoint: in the first record after a resume

    @property
    def busiest_expert(self) -> float | None:
        """The load of the busiest expert, relative to the mean of its layer; None without experts."""
        return max(self._loads(max), default=None)

    @property
    def idlest_expert(self) -> float | None:
        """The load of the idlest expert, relative to the mean of its layer; None without experts."""
        return min(self._loads(min), default=None)

    def _loads(self, choose: Callable[[Sequence[int]], int]) -> list[float]:
        return [choose(layer) * len(layer) / sum(layer) for layer in self.tokens_per_expert or () if sum(layer)]


def record_to_line(record: StepRecord) -> str:
    """Return the record as a line of strict JSON: unset fields are omitted, and a number that is not finite is null."""
    content: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if value is not None:
            content[field.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(content) + "\n"


def line_to_record(line: str) -> StepRecord:
    """Parse a line; null stands for nan, and unknown keys are ignored.

    Raises:
        ValueError: the line is not a record, such as one that a killed process did not finish.
    """
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError(f"{line!r} is not a record")
    known = {field.name for field in fields(StepRecord)}
    values: dict[str, Any] = {
        name: math.nan if value is None else value for name, value in content.items() if name in known
    }
    try:
        return StepRecord(**values)
    except TypeError as error:
        raise ValueError(f"{line!r} is not a record: {error}") from error


def read_records(file: str | Path) -> list[StepRecord]:
    """Read the records of a metrics.jsonl in order; an unfinished last line is ignored.

    Raises:
        ValueError: another line is not a record.
    """
    file = Path(file)
    text = file.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    records = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            records.append(line_to_record(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    return records


def read_run(folder: Path) -> list[StepRecord]:
    """Read the logged steps of the run in `folder`; raises ValueError if the folder is not one of a run."""
    file = folder / METRICS_FILE
    if not file.is_file():
        raise ValueError(f"{folder} has no {METRICS_FILE}; pass the output folder of a run of nxd train")
    return read_records(file)


class FollowedRecords:
    """The records of a run that continues; only new lines are read. The file may appear later.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / METRICS_FILE
        self._identity: int | None = None
        self._offset = 0
        self._records: list[StepRecord] = []

    def poll(self) -> list[StepRecord]:
        """Return all records up to now.

        Raises:
            ValueError: a complete line is not a record.
        """
        try:
            with self._file.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != self._identity or status.st_size < self._offset:  # a resumed run writes a new file
                    self._identity, self._offset, self._records = status.st_ino, 0, []
                stream.seek(self._offset)
                complete = stream.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        if complete:
            self._records += map(line_to_record, complete.decode("utf-8").split("\n"))
            self._offset += len(complete) + 1
        return self._records


class Tracker(Protocol):
    """Gets every logged step of a run."""

    def log(self, record: StepRecord) -> None:
        """Add a record."""

    def close(self) -> None:
        """Send the remaining records, and close."""


class MetricsLog:
    """Writes the records of a run to its folder. A context manager.

    The file never has a step twice: records of an earlier invocation after the step that this one resumes from are
    removed at the start. Each line is flushed before `log` returns.

    Args:
        folder: the run's folder; created if missing.
        is_writer: whether this rank writes; other ranks do nothing.
        first_step: step that this invocation resumes from; 0 starts a new file.
        layout: layout of this invocation, such as "TP 2 x DP 2"; stored with its first record.
        trackers: trackers that also get each record, and are closed with the file.

    Attributes:
        file: the metrics.jsonl.

    Raises:
        ValueError: the existing file has lines that are not records.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        is_writer: bool = True,
        first_step: int = 0,
        layout: str | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        self.file = Path(folder) / METRICS_FILE
        self._first_record: dict[str, Any] = {"layout": layout, "resumed_from": first_step or None}
        self._trackers = trackers
        self._stream: TextIO | None = None
        if is_writer:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _keep_until(self.file, first_step)
            self._stream = self.file.open("a", encoding="utf-8")

    def log(self, record: StepRecord) -> None:
        """Add a record; raises OSError if it cannot be written, for example because the disk is full."""
        if self._stream is None:
            return
        if self._first_record:
            record = replace(record, **self._first_record)
            self._first_record = {}
        try:
            self._stream.write(record_to_line(record))
            self._stream.flush()
            for tracker in self._trackers:
                tracker.log(record)
        except OSError as error:
            what = f"the metrics of step {record.step} cannot be written: {error.strerror or error}"
            raise OSError(error.errno, what, str(self.file.parent)) from error

    def close(self) -> None:
        """Close the file and the trackers."""
        if self._stream is not None:
            self._stream.close()
            for tracker in self._trackers:
                tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        with suppress(OSError) if error_type else nullcontext():  # the first error says more
            self.close()


def _keep_until(file: Path, step: int) -> None:
    """Remove the records after `step`: the others are written to a new file, which replaces the old one."""
    if not file.exists():
        return
    kept = [record for record in read_records(file) if record.step <= step] if step else []
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text("".join(record_to_line(record) for record in kept), encoding="utf-8")
    os.replace(unfinished, file)
