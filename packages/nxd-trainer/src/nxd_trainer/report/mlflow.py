"""MLflow: a run's scalars and settings. MLFLOW_TRACKING_URI says where to; by default it is a file of the run."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_trainer.report.metrics import StepRecord
from nxd_trainer.report.scalars import kept_run_id, scalars_of


class MlflowTracker:
    """Logs to the experiment MLFLOW_EXPERIMENT_NAME, or "nxd"; without a server to `mlflow/` of the run's folder.

    A run that resumes continues under the same id.

    Args:
        folder: folder of the run, which determines the run's name.
        first_step: step that the run resumes from.
        settings: settings of the run.
    """

    def __init__(self, folder: Path, *, first_step: int, settings: Mapping[str, Any]) -> None:
        import mlflow  # noqa: PLC0415  (optional package)
        from mlflow.entities import Metric, Param  # noqa: PLC0415

        self._metric = Metric
        own = folder.resolve() / "mlflow"
        own.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{own / 'mlflow.db'}")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id, is_new = kept_run_id(own / "run_id", first_step, lambda: self._new_run(folder.name))
        if is_new:  # MLflow refuses to change a parameter
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
