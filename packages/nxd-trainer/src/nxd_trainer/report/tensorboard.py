"""TensorBoard scalars of a run, in `tensorboard/` of its folder.

The file is written here and not by torch's `SummaryWriter`, whose thread prints a traceback of its own where the disk
is full.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_optim import LARGEST_EXPONENT, SMALLEST_EXPONENT, GradientHistogram

from nxd_trainer.report.metrics import StepRecord
from nxd_trainer.report.scalars import scalars_of

# Tags of existing training scripts for NeuronX Distributed, so that their dashboards show these runs, too.
_OLD_TAGS = {
    "loss": "step loss",
    "grad_norm": "grad-norm",
    "learning_rate": "learning rate",
    "throughput": "throughput",
}


class TensorBoardTracker:
    """Writes scalars, so that a crash of the process does not lose them.

    Args:
        folder: folder of the run.
        first_step: step that the run resumes from; what earlier invocations logged after it is hidden.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415 - optional
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary  # noqa: PLC0415 - optional
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415 - optional

        self._event, self._summary, self._histogram = Event, Summary, HistogramProto
        folder = folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()

    def log(self, record: StepRecord) -> None:
        """Add a record.

        Raises:
            OSError: it cannot be written.
        """
        old = {tag: getattr(record, name) for name, tag in _OLD_TAGS.items()}
        scalars = {tag: value for tag, value in {**scalars_of(record), **old}.items() if value is not None}
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(self._event(step=record.step, summary=self._summary(value=values)))
        self._writer.flush()

    def log_gradients(self, step: int, histograms: Mapping[str, GradientHistogram]) -> None:
        """Add histograms of gradients by the base-2 logarithm of their magnitude; zeros count at the left end.

        Raises:
            OSError: they cannot be written.
        """
        values = [
            self._summary.Value(tag=f"gradients/{name}", histo=self._histo(it)) for name, it in histograms.items()
        ]
        self._write(self._event(step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def _histo(self, histogram: GradientHistogram) -> Any:
        counts = [histogram.zeros, *histogram.counts.tolist()]
        centers = [exponent - 0.5 for exponent in range(SMALLEST_EXPONENT, LARGEST_EXPONENT + 2)]
        return self._histogram(
            min=SMALLEST_EXPONENT - 1,
            max=LARGEST_EXPONENT + 1,
            num=sum(counts),
            sum=sum(count * center for count, center in zip(counts, centers, strict=True)),
            sum_squares=sum(count * center**2 for count, center in zip(counts, centers, strict=True)),
            bucket_limit=[center + 0.5 for center in centers],
            bucket=counts,
        )

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
