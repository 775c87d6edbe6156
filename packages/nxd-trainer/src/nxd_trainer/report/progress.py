"""The display of a run: a progress bar on a terminal, otherwise a plain line per record, and a final summary.

It also measures throughput and peak memory. Only the rank that writes metrics shows anything.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median_high
from time import perf_counter
from typing import Any, Self, TextIO

import nxd_state
import torch
from nxd_cli.output import show_count, show_duration, show_memory
from tqdm import tqdm

from nxd_trainer.report.metrics import StepRecord

# The most important values first: a narrow terminal cuts off the end.
BAR_FORMAT = "{n_fmt}/{total_fmt} {bar:10} ETA {remaining} | {desc}"


class ProgressDisplay:
    """Shows the progress of a run. A context manager.

    Args:
        last_step: the step at which this invocation ends.
        first_step: the step that it resumes from; 0 for a new run.
        is_writer: whether this rank shows anything.
        stream: output stream; standard error by default. A bar is drawn if it is a terminal.
    """

    def __init__(self, last_step: int, *, first_step: int = 0, is_writer: bool = True, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._is_writer = is_writer
        self._first_step, self._last_step = first_step, last_step
        self._began = perf_counter()
        self._held_out_loss: float | None = None
        self._bar: Any = None
        if is_writer and self._stream.isatty():
            self._bar = tqdm(
                total=last_step,
                initial=first_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=BAR_FORMAT,
                desc="first step",
            )

    def advance(self, step: int) -> None:
        """Move the bar to a step."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, record: StepRecord) -> None:
        """Show a record in the bar, or as a line."""
        if not self._is_writer:
            return
        if record.held_out_loss is not None:
            self._held_out_loss = record.held_out_loss
        if self._bar is not None:
            self._bar.set_description_str(describe(record, held_out_loss=self._held_out_loss))
            return
        width = len(str(self._last_step))
        done = record.step - self._first_step
        remaining = (perf_counter() - self._began) / max(1, done) * (self._last_step - record.step)
        line = describe(record, held_out_loss=record.held_out_loss)
        eta = show_duration(remaining)
        self.message(f"step {record.step:{width}}/{self._last_step} | ETA {eta} | {line}")

    def message(self, text: str) -> None:
        """Print a line of text, above the bar if there is one."""
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
        elif self._is_writer:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Close the bar, which stays visible."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def describe(record: StepRecord, *, held_out_loss: float | None) -> str:
    """Return the values of a record on one line, without the step."""
    parts = [f"step_loss {record.loss:.4f}"]
    if held_out_loss is not None:
        parts.append(f"held-out {held_out_loss:.4f}")
    parts.append(f"{show_count(record.tokens_per_second)} tok/s")
    if record.throughput is not None:
        parts.append(f"throughput {record.throughput:.4g} seq/s")
    if record.grad_norm is not None:
        parts.append(f"grad-norm {record.grad_norm:.2f}")
    if record.loss_scale is not None:
        parts.append(f"loss scale {record.loss_scale:g}")
    if record.busiest_expert is not None:
        parts.append(f"busiest expert {record.busiest_expert:.2f}x")
    parts.append(f"lr {record.learning_rate:.1e}")
    parts.append(show_memory(record.peak_memory_bytes))
    return "  ".join(parts)


class Throughput:
    """Measures sequences and tokens per second of training steps, without pauses such as evaluations."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._lap_began = self._began
        self._lap_sequences = self._lap_tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds since this object was created, including pauses."""
        return perf_counter() - self._began

    def add(self, sequences: int, tokens: int) -> None:
        """Count the sequences and tokens of a step, over all ranks."""
        self._lap_sequences += sequences
        self._lap_tokens += tokens

    def lap(self) -> tuple[float, float]:
        """Return sequences and tokens per second since the last call, without pauses."""
        now = perf_counter()
        seconds = max(now - self._lap_began, 1e-9)
        rates = self._lap_sequences / seconds, self._lap_tokens / seconds
        self._lap_began, self._lap_sequences, self._lap_tokens = now, 0, 0
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this block, such as for an evaluation or a checkpoint."""
        began = perf_counter()
        try:
            yield
        finally:
            self._lap_began += perf_counter() - began


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory use: the device's if torch counts it, otherwise this process's resident set."""
    own = nxd_state.peak_memory_bytes(device)
    if own is not None:
        return own
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB, macOS in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def render_summary(records: Sequence[StepRecord], files: Mapping[str, str | Path | None]) -> str:
    """Return the summary of a run as plain text, without a final newline.

    Args:
        records: all records of the run, from `read_records`; may be empty.
        files: files by name; None for files that were not written.
    """
    rows = [*summary_rows(records), *((name, str(path)) for name, path in files.items() if path is not None)]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows)


def summary_rows(records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    """Return the names and values of a run's summary; "step loss" is that of single steps, not a mean over several."""
    if not records:
        return [("steps", "none logged")]
    invocations = _split_invocations(records)
    seconds = sum(invocation[-1].seconds for invocation in invocations)
    resumes = [str(record.resumed_from) for record in records if record.resumed_from is not None]
    steps = str(records[-1].step) + (f", resumed at {', '.join(resumes)}" if resumes else "")
    rows = [
        ("steps", steps),
        ("tokens", _show_tokens(records[-1])),
        ("time", show_duration(seconds)),
        ("speed", f"{show_count(median_high(it.tokens_per_second for it in records))} tokens/s (median)"),
        ("step loss", _losses([(record.step, record.loss) for record in records])),
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


def _show_tokens(record: StepRecord) -> str:
    counted = show_count(record.tokens)
    if record.tokens_seen in (None, record.tokens):
        return counted
    return f"{show_count(record.tokens_seen)}, of which the loss counted {counted}"


def _split_invocations(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    invocations: list[list[StepRecord]] = []
    for record in records:
        if not invocations or record.resumed_from is not None:
            invocations.append([])
        invocations[-1].append(record)
    return invocations
