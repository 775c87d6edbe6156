"""The output of a training run: progress, metrics, the log of the run, trackers, the report and a summary.

Only one rank writes; on the others the same objects do nothing. The loop passes a `StepRecord` for each logged step.
"""

from nxd_trainer.report.metrics import MetricsLog, StepRecord, Tracker, read_records
from nxd_trainer.report.progress import ProgressDisplay, Throughput, peak_memory_bytes, render_summary
from nxd_trainer.report.run_log import RunLog
from nxd_trainer.report.trackers import open_trackers

__all__ = [
    # one logged step
    "StepRecord",
    "read_records",
    "Throughput",
    "peak_memory_bytes",
    # while the run continues
    "ProgressDisplay",
    "MetricsLog",
    "RunLog",
    "Tracker",
    "open_trackers",
    # when it has ended
    "render_summary",
]
