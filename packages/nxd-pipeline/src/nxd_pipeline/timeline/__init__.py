"""Timelines of training steps: measured on all ranks with one clock, stored in a file, drawn, and evaluated."""

from nxd_pipeline.timeline.trace_file import MAX_STEPS, TraceFile, read_trace
from nxd_pipeline.timeline.traced_step import BubbleReport, TracedStep, bubble_report, measured_costs

__all__ = [
    "TraceFile",
    "MAX_STEPS",
    "read_trace",
    "BubbleReport",
    "TracedStep",
    "bubble_report",
    "measured_costs",
]
