"""The metrics of a run on disk: metrics.jsonl with a line for each logged step, and TensorBoard scalars."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from nxd_trainer.report.record import StepRecord, read_records, record_to_line
from nxd_trainer.report.tensorboard import open_summary_writer, write_scalars

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsLog:
    """Writes the records of a run into its folder. A context manager.

    The file never holds a step twice: what an earlier invocation logged after the step that this one goes on
    from is cut off when it begins. Each line is on its way to the disk before `log` returns.

    Args:
        folder: the run's folder; made if need be.
        is_writer: whether this rank writes; on other ranks nothing happens.
        first_step: step of the checkpoint this invocation goes on from; 0 begins a new file.
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
