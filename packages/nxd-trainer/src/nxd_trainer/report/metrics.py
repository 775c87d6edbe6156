"""The metrics of a run on disk: metrics.jsonl with a line for each logged step, and TensorBoard scalars.

A `StepRecord` is one logged step. Everything that reports a run reads these.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The state of a run after one optimizer step."""

    step: int  # optimizer steps taken, from 1
    loss: float  # mean training loss of the step, over all ranks
    learning_rate: float
    tokens: int  # that the loss has counted since the run began
    tokens_per_second: float  # read over all ranks, without padding, since the record before
    seconds: float  # since this invocation began
    peak_memory_bytes: int  # of the writer's process or device
    tokens_seen: int | None = None  # read since the run began, without padding; None in records from before this field
    throughput: float | None = None  # sequences per second, as scripts for NeuronX Distributed count
    grad_norm: float | None = None  # before clipping; None without clipping
    held_out_loss: float | None = None  # None where the step ended without evaluation
    layout: str | None = None  # "TP 2 x DP 2": in the first record of each invocation
    resumed_from: int | None = None  # step of the checkpoint: in the first record after a resume


def record_to_line(record: StepRecord) -> str:
    """The record as a line of strict JSON: unset fields are left out, a number that is not finite is null."""
    content: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if value is not None:
            content[field.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(content) + "\n"


def line_to_record(line: str) -> StepRecord:
    """The record of a line; null was a number that is not finite. Keys it does not know are left out.

    Raises:
        ValueError: not a record, such as the line that a killed process did not finish.
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
    """The records of a metrics.jsonl in their order; a last line that was not finished is left out.

    Raises:
        ValueError: any other line is not a record.
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


METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsLog:
    """Writes the records of a run into its folder. A context manager.

    The file never holds a step twice: records that an earlier invocation logged after the step that this one resumes
    from are cut off at the start. Each line is on its way to the disk before `log` returns.

    Args:
        folder: the run's folder; made if need be.
        is_writer: whether this rank writes; on other ranks nothing happens.
        first_step: step of the checkpoint this invocation resumes from; 0 begins a new file.
        layout: of this invocation, such as "TP 2 x DP 2"; kept with its first record.
        say: is given a line to show if TensorBoard is not installed.

    Attributes:
        file: the metrics.jsonl.

    Raises:
        ValueError: the file that is to be gone on with holds something else.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        is_writer: bool = True,
        first_step: int = 0,
        layout: str | None = None,
        say: Callable[[str], None] = print,
    ):
        self.file = Path(folder) / METRICS_FILE
        self._first_record: dict[str, Any] = {"layout": layout, "resumed_from": first_step or None}
        self._stream: TextIO | None = None
        self._tensorboard = None
        if is_writer:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _keep_until(self.file, first_step)
            self._stream = self.file.open("a", encoding="utf-8")
            self._tensorboard = open_summary_writer(
                self.file.parent / TENSORBOARD_FOLDER, first_step=first_step, say=say
            )

    def log(self, record: StepRecord) -> None:
        """Add a record."""
        if self._stream is None:
            return
        if self._first_record:
            record = replace(record, **self._first_record)
            self._first_record = {}
        self._stream.write(record_to_line(record))
        self._stream.flush()
        if self._tensorboard is not None:
            write_scalars(self._tensorboard, record)

    def close(self) -> None:
        """Close the files."""
        if self._stream is not None:
            self._stream.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _keep_until(file: Path, step: int) -> None:
    """Cut off the records after `step`: the others are written to a new file, which replaces the old one."""
    if not file.exists():
        return
    kept = [record for record in read_records(file) if record.step <= step] if step else []
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text("".join(record_to_line(record) for record in kept), encoding="utf-8")
    os.replace(unfinished, file)


# TensorBoard groups the scalars by what stands before the slash. The tags behind ours are those of existing training
# scripts for NeuronX Distributed, so that their dashboards show these runs, too.
TAGS: dict[str, tuple[str, ...]] = {
    "loss": ("loss/train", "step loss"),
    "held_out_loss": ("loss/held_out",),
    "grad_norm": ("train/grad_norm", "grad-norm"),
    "learning_rate": ("train/learning_rate", "learning rate"),
    "tokens_per_second": ("speed/tokens_per_second",),
    "throughput": ("throughput",),
    "peak_memory_bytes": ("speed/peak_memory_bytes",),
}


def open_summary_writer(folder: Path, *, first_step: int, say: Callable[[str], None]) -> SummaryWriter | None:
    """A writer that hides what earlier invocations logged after `first_step`; None without tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional package)
    except ImportError:
        say(missing_extra("tensorboard", "TensorBoard scalars"))
        return None
    return SummaryWriter(str(folder), purge_step=first_step + 1)


def write_scalars(writer: SummaryWriter, record: StepRecord) -> None:
    """Write a record's scalars, so that a crash of the process does not lose them."""
    for name, tags in TAGS.items():
        value = getattr(record, name)
        if value is not None:
            for tag in tags:
                writer.add_scalar(tag, value, record.step)
    writer.flush()


def missing_extra(package: str, purpose: str) -> str:
    """One line: what is not there, and how to get it."""
    return f"{purpose} left out: {package} is not installed (pip install 'nxd-trainer[report]')"
