"""Where a run's scalars go besides its metrics file: TensorBoard, Weights & Biases, MLflow, in an adapter file each.

Only the rank that writes has trackers. What each of them needs is installed by an extra of its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxd_trainer.report.metrics import StepRecord, Tracker

# Dashboards group scalars by what stands before the slash.
_TAGS = {
    "loss": "loss/train",
    "held_out_loss": "loss/held_out",
    "aux_loss": "loss/aux",
    "z_loss": "loss/router_z",
    "busiest_expert": "train/busiest_expert",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "tokens": "train/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "peak_memory_bytes": "speed/peak_memory_bytes",
}


def open_trackers(
    names: Iterable[str],
    folder: Path,
    *,
    first_step: int,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[Tracker]:
    """The trackers with these names.

    Args:
        names: of "tensorboard", "wandb" and "mlflow".
        folder: of the run; what a tracker keeps of its own goes there.
        first_step: step of the checkpoint that the run resumes from, then with the trackers' earlier runs; 0: new ones.
        settings: of the run, in sections, for trackers that show them.
        say: is given a line if TensorBoard, which is the default, is not installed.

    Raises:
        ValueError: another one is not installed, or cannot be opened.
    """
    opened: list[Tracker] = []
    for name in names:
        if find_spec(name) is None:
            missing = f"{name} is not installed (pip install 'nxd-trainer[{name}]')"
            if name != "tensorboard":
                raise ValueError(f"train.report_to={name}: {missing}")
            say(f"TensorBoard scalars left out: {missing}")
            continue
        try:
            opened.append(_open(name, folder, first_step, settings))
        except Exception as error:  # whatever its server or its files are about
            for tracker in opened:
                tracker.close()
            raise ValueError(f"train.report_to={name} cannot be opened: {type(error).__name__}: {error}") from error
    return opened


def scalars_of(record: StepRecord) -> dict[str, float]:
    """The measures of a record that are set and finite, by tag."""
    values = {tag: getattr(record, name) for name, tag in _TAGS.items()}
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}


def kept_run_id(file: Path, first_step: int, make: Callable[[], str]) -> tuple[str, bool]:
    """The name under which a tracker knows a run that resumes, or a new one, which is kept; and whether it is new."""
    if first_step and file.is_file():
        return file.read_text(encoding="utf-8").strip(), False
    run_id = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(run_id + "\n", encoding="utf-8")
    return run_id, True


def _open(name: str, folder: Path, first_step: int, settings: Mapping[str, Any]) -> Tracker:
    if name == "tensorboard":
        from nxd_trainer.report.tensorboard import TensorBoardTracker  # noqa: PLC0415  (optional package)

        return TensorBoardTracker(folder, first_step=first_step)
    if name == "wandb":
        from nxd_trainer.report.wandb import WandbTracker  # noqa: PLC0415  (optional package)

        return WandbTracker(folder, first_step=first_step, settings=settings)
    from nxd_trainer.report.mlflow import MlflowTracker  # noqa: PLC0415  (optional package)

    return MlflowTracker(folder, first_step=first_step, settings=settings)
