"""Weights & Biases: a run's scalars and settings. The environment says where to (WANDB_MODE, WANDB_PROJECT, ...)."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_trainer.report.metrics import StepRecord
from nxd_trainer.report.scalars import kept_run_id, scalars_of


class WandbTracker:
    """Logs to the project WANDB_PROJECT, or "nxd"; with WANDB_MODE=offline to `wandb/` of the run's folder.

    A run that resumes continues under the same id. Weights & Biases does not take back steps that it has already got.

    Args:
        folder: folder of the run, which determines the run's name.
        first_step: step that the run resumes from.
        settings: settings of the run.
    """

    def __init__(self, folder: Path, *, first_step: int, settings: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415  (optional package)

        run_id, _ = kept_run_id(folder / "wandb" / "run_id", first_step, lambda: secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nxd"),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=run_id,
            resume="allow",
            dir=folder,
            config=dict(settings),
            # Its own copy of what the program prints would mix with the progress bar.
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, record: StepRecord) -> None:
        """Add a record."""
        self._run.log(scalars_of(record), step=record.step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
