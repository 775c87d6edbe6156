"""Sends a run's metrics to TensorBoard, Weights & Biases and MLflow, besides its metrics file.

Only the rank that writes metrics has trackers. Each tracker needs its optional package, installed by an extra of the
same name, and imports it when it is opened.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxd_optim import LARGEST_EXPONENT, SMALLEST_EXPONENT, GradientHistogram

from nxd_trainer.report.metrics import StepRecord, Tracker

# Dashboards group scalars by the text before the slash.
_TAGS = {
    "loss": "loss/train",
    "held_out_loss": "loss/held_out",
    "aux_loss": "loss/aux",
    "z_loss": "loss/router_z",
    "busiest_expert": "train/busiest_expert",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "skipped_steps": "train/skipped_steps",
    "learning_rate": "train/learning_rate",
    "tokens": "train/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "peak_memory_bytes": "speed/peak_memory_bytes",
}
# Tags of existing training scripts for NeuronX Distributed, so that their dashboards also show these runs.
_TAGS_OF_SCRIPTS = {
    "loss": "step loss",
    "grad_norm": "grad-norm",
    "learning_rate": "learning rate",
    "throughput": "throughput",
}


def open_trackers(
    names: Iterable[str],
    folder: Path,
    *,
    first_step: int,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[Tracker]:
    """Open the trackers with these names.

    Args:
        names: any of "tensorboard", "wandb" and "mlflow".
        folder: folder of the run, also for the trackers' own files.
        first_step: step that the run resumes from, in the same runs of the trackers; 0 starts new ones.
        settings: the run's settings by section, for trackers that show them.
        say: function that logs a line if TensorBoard, the default, is not installed.

    Raises:
        ValueError: another tracker is not installed, or a tracker cannot be opened.
    """
    opened: list[Tracker] = []
    for name in names:
        if find_spec(name) is None:
            missing = f"{name} is not installed (pip install 'nxd-trainer[{name}]')"
            if name != "tensorboard":
                raise ValueError(f"train.report_to={name}: {missing}")
            say(f"TensorBoard scalars skipped: {missing}")
            continue
        try:
            if name == "tensorboard":
                opened.append(TensorBoardTracker(folder, first_step=first_step))
            elif name == "wandb":
                opened.append(WandbTracker(folder, first_step=first_step, settings=settings))
            else:
                opened.append(MlflowTracker(folder, first_step=first_step, settings=settings))
        except Exception as error:  # any error of its server or its files
            for tracker in opened:
                tracker.close()
            raise ValueError(f"train.report_to={name} cannot be opened: {type(error).__name__}: {error}") from error
    return opened


def scalars_of(record: StepRecord) -> dict[str, float]:
    """Return the record's values that are set and finite, by tag."""
    values = {tag: getattr(record, name) for name, tag in _TAGS.items()}
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}


def _run_id(file: Path, first_step: int, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the id that a resumed run had in a tracker, or a new one, which is stored; and whether it is new."""
    if first_step and file.is_file():
        return file.read_text(encoding="utf-8").strip(), False
    run_id = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(run_id + "\n", encoding="utf-8")
    return run_id, True


class TensorBoardTracker:
    """Writes scalars to `tensorboard/` in the run's folder, each flushed so that a crash does not lose it.

    It does not use torch's `SummaryWriter`, whose thread prints its own traceback when the disk is full.

    Args:
        folder: folder of the run.
        first_step: step that the run resumes from; later steps of earlier invocations are hidden.
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
        """Add a record; raises OSError if it cannot be written."""
        scalars = scalars_of(record) | {tag: getattr(record, name) for name, tag in _TAGS_OF_SCRIPTS.items()}
        self._add(
            record.step,
            [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if value is not None],
        )

    def log_gradients(self, step: int, histograms: Mapping[str, GradientHistogram]) -> None:
        """Add histograms of gradients over the base-2 logarithm of their magnitude; zeros are counted at the left end.

        Raises:
            OSError: they cannot be written.
        """
        values = [
            self._summary.Value(tag=f"gradients/{name}", histo=self._histo(it)) for name, it in histograms.items()
        ]
        self._add(step, values)

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

    def _add(self, step: int, values: list[Any]) -> None:
        self._write(self._event(step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())


class WandbTracker:
    """Logs to the Weights & Biases project WANDB_PROJECT, or "nxd"; with WANDB_MODE=offline, to `wandb/` of the run.

    A resumed run continues under its id. Weights & Biases does not remove steps that it already has.

    Args:
        folder: folder of the run, whose name is the run's.
        first_step: step that the run resumes from.
        settings: settings of the run.
    """

    def __init__(self, folder: Path, *, first_step: int, settings: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415 - optional

        run_id, _ = _run_id(folder / "wandb" / "run_id", first_step, lambda: secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nxd"),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=run_id,
            resume="allow",
            dir=folder,
            config=dict(settings),
            # Its capture of the program's output would interfere with the progress bar.
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, record: StepRecord) -> None:
        """Add a record."""
        self._run.log(scalars_of(record), step=record.step)

    def close(self) -> None:
        """Send the remaining records."""
        self._run.finish()


class MlflowTracker:
    """Logs to the MLflow experiment MLFLOW_EXPERIMENT_NAME, or "nxd"; without MLFLOW_TRACKING_URI, to `mlflow/`.

    A resumed run continues under its id.

    Args:
        folder: folder of the run, whose name is the run's.
        first_step: step that the run resumes from.
        settings: settings of the run.
    """

    def __init__(self, folder: Path, *, first_step: int, settings: Mapping[str, Any]) -> None:
        import mlflow  # noqa: PLC0415 - optional
        from mlflow.entities import Metric, Param  # noqa: PLC0415 - optional

        self._metric = Metric
        own = folder.resolve() / "mlflow"
        own.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{own / 'mlflow.db'}")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id, is_new = _run_id(own / "run_id", first_step, lambda: self._new_run(folder.name))
        if is_new:  # MLflow does not allow parameters to change
            parameters = [
                Param(f"{section}.{name}", str(value))
                for section, values in settings.items()
                if isinstance(values, Mapping)
                for name, value in values.items()
            ]
            self._client.log_batch(self._run_id, params=parameters)
        self._client.update_run(self._run_id, status="RUNNING")

    def _new_run(self, name: str) -> str:
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nxd")
        experiment = self._client.get_experiment_by_name(title)
        found = self._client.create_experiment(title) if experiment is None else experiment.experiment_id
        run_id: str = self._client.create_run(found, run_name=name).info.run_id
        return run_id

    def log(self, record: StepRecord) -> None:
        """Add a record."""
        now = int(time.time() * 1000)
        metrics = [self._metric(tag, value, now, record.step) for tag, value in scalars_of(record).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id)
