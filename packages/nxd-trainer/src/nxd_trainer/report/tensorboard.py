"""TensorBoard scalars of a run, in `tensorboard/` of its folder."""

from pathlib import Path

from nxd_trainer.report.metrics import StepRecord
from nxd_trainer.report.trackers import scalars_of

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
        folder: of the run.
        first_step: step that the run resumes from; what earlier invocations logged after it is hidden.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional package)

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, record: StepRecord) -> None:
        """Add a record."""
        old = {tag: getattr(record, name) for name, tag in _OLD_TAGS.items()}
        for tag, value in {**scalars_of(record), **old}.items():
            if value is not None:
                self._writer.add_scalar(tag, value, record.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
