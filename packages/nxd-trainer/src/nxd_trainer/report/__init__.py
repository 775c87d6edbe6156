"""The output of a training run: a live line, metrics, the loss curve and a summary.

Only one rank writes; the others hold the same objects and stay silent. Reports do not know the model: the loop passes
one `StepRecord` for each logged step.
"""

from nxd_trainer.report.expert_load import draw_expert_loads
from nxd_trainer.report.loss_curve import draw_loss_curve
from nxd_trainer.report.metrics import MetricsLog, StepRecord, Tracker, read_records
from nxd_trainer.report.progress import Progress, Throughput, peak_memory_bytes, render_summary
from nxd_trainer.report.trackers import open_trackers

__all__ = [
    # one logged step
    "StepRecord",
    "read_records",
    "Throughput",
    "peak_memory_bytes",
    # while the run continues
    "Progress",
    "MetricsLog",
    "Tracker",
    "open_trackers",
    # when it has ended
    "draw_expert_loads",
    "draw_loss_curve",
    "render_summary",
]
