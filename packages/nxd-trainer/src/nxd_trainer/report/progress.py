"""The live line of a run: a tqdm bar with the latest measures on a terminal, else one plain line per record.

Only the writer's rank shows anything.
"""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from nxd_trainer.report.record import StepRecord
from nxd_trainer.report.units import show_count, show_duration, show_memory

# What matters most stands first: a narrow terminal cuts off the end.
BAR_FORMAT = "{n_fmt}/{total_fmt} {bar:10} ETA {remaining} | {desc}"


class Progress:
    """Shows how a run goes on. A context manager; `close` leaves the terminal in order.

    Args:
        last_step: the step at which this invocation ends.
        first_step: steps already taken when it begins, more than 0 after a resume.
        is_writer: whether this rank shows anything.
        stream: where to; standard error where unset. A bar is drawn if it is a terminal.
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
        """Say that `step` is done; moves the bar and prints nothing."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, record: StepRecord) -> None:
        """Show a record: in the bar, or as a line."""
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
        """Print a line of text, above the bar where there is one."""
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
        elif self._is_writer:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar; what it shows stays."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def describe(record: StepRecord, *, held_out_loss: float | None) -> str:
    """The measures of a record on one line, without the step."""
    parts = [f"step_loss {record.loss:.4f}"]
    if held_out_loss is not None:
        parts.append(f"held-out {held_out_loss:.4f}")
    parts.append(f"{show_count(record.tokens_per_second)} tok/s")
    if record.throughput is not None:
        parts.append(f"throughput {record.throughput:.4g} seq/s")
    if record.grad_norm is not None:
        parts.append(f"grad-norm {record.grad_norm:.2f}")
    parts.append(f"lr {record.learning_rate:.1e}")
    parts.append(show_memory(record.peak_memory_bytes))
    return "  ".join(parts)
