"""The table a run ends with: how far it came, how fast, how well, and where its files are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from nxd_trainer.report.record import StepRecord
from nxd_trainer.report.units import show_count, show_duration, show_memory


def render_summary(records: Sequence[StepRecord], files: Mapping[str, str | Path | None]) -> str:
    """The summary of a run as plain text, without a line break at its end.

    Args:
        records: all records of the run, as `read_records` gives them; may be empty.
        files: what lies where, by name; None for what could not be made.
    """
    rows = [*_measures(records), *((name, str(path)) for name, path in files.items() if path is not None)]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows)


def _measures(records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    if not records:
        return [("steps", "none logged")]
    invocations = _split_invocations(records)
    seconds = sum(invocation[-1].seconds for invocation in invocations)
    resumes = [str(record.resumed_from) for record in records if record.resumed_from is not None]
    steps = str(records[-1].step) + (f", resumed at {', '.join(resumes)}" if resumes else "")
    rows = [
        ("steps", steps),
        ("tokens", show_count(records[-1].tokens)),
        ("time", show_duration(seconds)),
        ("speed", f"{show_count(_median_speed(records))} tokens/s (median)"),
        ("train loss", _losses([(record.step, record.loss) for record in records])),
    ]
    held_out = [(record.step, record.held_out_loss) for record in records if record.held_out_loss is not None]
    if held_out:
        rows.append(("held-out loss", _losses(held_out)))
    rows.append(("peak memory", show_memory(max(record.peak_memory_bytes for record in records))))
    return rows


def _losses(losses: list[tuple[int, float]]) -> str:
    finite = [(loss, step) for step, loss in losses if math.isfinite(loss)]
    best, best_step = min(finite, default=(math.nan, 0))
    return f"{losses[0][1]:.4f} -> {losses[-1][1]:.4f}, best {best:.4f} at step {best_step}"


def _median_speed(records: Sequence[StepRecord]) -> float:
    speeds = sorted(record.tokens_per_second for record in records)
    return speeds[len(speeds) // 2]


def _split_invocations(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    invocations: list[list[StepRecord]] = []
    for record in records:
        if not invocations or record.resumed_from is not None:
            invocations.append([])
        invocations[-1].append(record)
    return invocations
