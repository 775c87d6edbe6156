"""The live view of a run: `nxd report RUN --watch`. On a terminal a picture that is renewed, in a pipe a line per step.

It reads the run's folder only, which may appear later, and ends when the run is known to be over.
"""

import math
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from nxd_cli.output import printable, show_count, show_duration, show_memory
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nxd_trainer.report.metrics import FollowedRecords, StepRecord
from nxd_trainer.report.progress import describe, render_summary
from nxd_trainer.report.run_log import CountedWarning, Event, count_warnings, describe_status, last_event, read_events

SECONDS_BETWEEN_LOOKS = 1.0
LAST_STEPS, LAST_WARNINGS = 10, 3
BLOCKS = "▁▂▃▄▅▆▇█"


def watch(folder: Path, console: Console) -> None:
    """Show a run until it is over, or until Ctrl-C.

    Raises:
        ValueError: the run's metrics have lines that are not records.
    """
    follow = _draw if console.is_terminal and not console.is_dumb_terminal else _print_lines
    try:
        follow(folder, FollowedRecords(folder), console)
    except KeyboardInterrupt:
        return


def _print_lines(folder: Path, followed: FollowedRecords, console: Console) -> None:
    printed, waits = 0, False
    while True:
        status, is_over = describe_status(read_events(folder))  # before the records, so that no last step is missed
        records = followed.poll()
        if not records and not waits and not is_over:
            waits = True
            _print(console, _waiting(folder, status))
        printed = min(printed, len(records))  # a resumed run has lost steps
        for record in records[printed:]:
            _print(console, f"step {record.step} | {describe(record, held_out_loss=record.held_out_loss)}")
        printed = len(records)
        if is_over:
            _print(console, status)
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _print(console: Console, line: str) -> None:
    console.print(Text(printable(line)), soft_wrap=True)
    console.file.flush()


def _draw(folder: Path, followed: FollowedRecords, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            events = read_events(folder)
            live.update(view(folder, followed.poll(), events, console), refresh=True)
            if describe_status(events)[1]:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)


def view(folder: Path, records: Sequence[StepRecord], events: Sequence[Event], console: Console) -> RenderableType:
    """Return what the terminal shows: status, progress, curve of the loss, summary, last steps and warnings."""
    status, is_over = describe_status(events)
    title = Text.assemble((printable(str(folder)), "bold"), "  ", printable(status), overflow="ellipsis", no_wrap=True)
    if not records:
        return Group(title, _waiting(folder, status))
    parts: list[RenderableType] = [title]
    total = (last_event(events, "start") or {}).get("last_step")
    if isinstance(total, int):
        eta = "" if is_over else f", ETA {show_duration(_seconds_left(records, total))}"
        progress = f"{records[-1].step:,} of {total:,} steps{eta}"
        width = max(1, min(40, console.width - len(progress) - 2))
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=total, completed=records[-1].step, width=width), progress)
        parts.append(row)
    if not console.options.ascii_only:
        parts.append(Text(f"loss  {sparkline([it.loss for it in records], console.width - 8)}"))
    summary = render_summary(records, {})
    parts += ["", Text(summary, overflow="ellipsis", no_wrap=True), ""]
    warnings = [_warning(it) for it in count_warnings(events)[-LAST_WARNINGS:]]
    room = console.height - len(parts) - summary.count("\n") - len(warnings) - 2  # the steps' head, and the cursor
    return Group(*parts, _steps(records[-max(1, min(room, LAST_STEPS)) :], console.width), *warnings)


def _waiting(folder: Path, status: str) -> str:
    if not folder.is_dir():
        return f"waiting for a run in {folder}, which does not exist yet"
    return f"waiting for the first step of {folder} ({status})"


def _warning(warning: CountedWarning) -> Text:
    times = f", {warning.count:,} times" if warning.count > 1 else ""
    text = printable(f"{warning.level}{times}: {warning.message}")
    return Text(text, "yellow", overflow="ellipsis", no_wrap=True)


def _seconds_left(records: Sequence[StepRecord], total: int) -> float:
    """Return the seconds to the last step, at the mean speed since the run started or resumed."""
    last = records[-1]
    first = next((it.resumed_from for it in reversed(records) if it.resumed_from is not None), 0)
    return last.seconds / max(1, last.step - first) * max(0, total - last.step)


def _steps(shown: Sequence[StepRecord], width: int) -> Table:
    """Return steps as a table; columns that no step has are left out, and the last ones if they do not fit."""
    columns = {
        "step": [f"{it.step:,}" for it in shown],
        "loss": [f"{it.loss:.4f}" for it in shown],
        "held-out": ["" if it.held_out_loss is None else f"{it.held_out_loss:.4f}" for it in shown],
        "tok/s": [show_count(it.tokens_per_second) for it in shown],
        "grad norm": ["" if it.grad_norm is None else f"{it.grad_norm:.3g}" for it in shown],
        "loss scale": ["" if it.loss_scale is None else f"{it.loss_scale:g}" for it in shown],
        "busiest expert": ["" if it.busiest_expert is None else f"{it.busiest_expert:.2f}x" for it in shown],
        "lr": [f"{it.learning_rate:.1e}" for it in shown],
        "memory": [show_memory(it.peak_memory_bytes) for it in shown],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    ends = accumulate(max(map(len, [name, *cells])) + len("  ") for name, cells in filled.items())
    fitting = {name: filled[name] for name, end in zip(filled, ends, strict=True) if end - len("  ") <= width}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in fitting:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(*fitting.values(), strict=True):
        table.add_row(*row)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as blocks of eight heights, at most `width` of them, each the mean of neighbors."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(len(finite), max(1, width))
    means = []
    for index in range(count):
        part = finite[index * len(finite) // count : (index + 1) * len(finite) // count]
        means.append(sum(part) / len(part))
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)
