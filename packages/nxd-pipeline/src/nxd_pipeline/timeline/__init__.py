"""Timelines of training steps: measured on all ranks with one clock, stored in a file, drawn, and evaluated."""

from nxd_pipeline.timeline.trace_file import MAX_EVENTS, MAX_STEPS, TraceFile, read_trace
from nxd_pipeline.timeline.traced_step import (
    BubbleReport,
    ClockOffset,
    TracedStep,
    bubble_report,
    clock_offsets,
    measured_costs,
)

__all__ = [
    "TraceFile",
    "MAX_STEPS",
    "MAX_EVENTS",
    "TracedStep",
    "read_trace",
    "BubbleReport",
    "bubble_report",
    "measured_costs",
    "ClockOffset",
    "clock_offsets",
]
