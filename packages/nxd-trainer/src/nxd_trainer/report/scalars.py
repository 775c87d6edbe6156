"""What the adapters of trackers share: a record's scalars by tag, and the name of a run that resumes."""

import math
from collections.abc import Callable
from pathlib import Path

from nxd_trainer.report.metrics import StepRecord

# Dashboards group scalars by what stands before the slash.
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
