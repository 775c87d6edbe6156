"""TensorBoard scalars of a run, where the package tensorboard is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_trainer.report.extras import missing_extra
from nxd_trainer.report.record import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
