"""Where a run's scalars go besides its metrics file: TensorBoard, Weights & Biases, MLflow, in an adapter file each.

Only the rank that writes has trackers. What each of them needs is installed by an extra of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxd_trainer.report.metrics import Tracker


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
        names: any of "tensorboard", "wandb" and "mlflow".
        folder: folder of the run, also for a tracker's own files.
        first_step: step of the checkpoint that the run resumes from, then with the trackers' earlier runs; 0: new ones.
        settings: settings of the run, in sections, for trackers that show them.
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
            say(f"TensorBoard scalars skipped: {missing}")
            continue
        try:
            opened.append(_open(name, folder, first_step, settings))
        except Exception as error:  # whatever its server or its files are about
            for tracker in opened:
                tracker.close()
            raise ValueError(f"train.report_to={name} cannot be opened: {type(error).__name__}: {error}") from error
    return opened


def _open(name: str, folder: Path, first_step: int, settings: Mapping[str, Any]) -> Tracker:
    if name == "tensorboard":
        from nxd_trainer.report.tensorboard import TensorBoardTracker  # noqa: PLC0415  (optional package)

        return TensorBoardTracker(folder, first_step=first_step)
    if name == "wandb":
        from nxd_trainer.report.wandb import WandbTracker  # noqa: PLC0415  (optional package)

        return WandbTracker(folder, first_step=first_step, settings=settings)
    from nxd_trainer.report.mlflow import MlflowTracker  # noqa: PLC0415  (optional package)

    return MlflowTracker(folder, first_step=first_step, settings=settings)
