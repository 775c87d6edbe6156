"""Schedules as CSV text: a line per rank, an action per cell, as in `0F0,0SA0>1,0F1,0SA1>1,0RG0<1,0B0`.

`Action` tells how an action is written. Empty cells are idle time and mean nothing, so tables that line up ranks in
time can be read as well, among them the computations that torch.distributed.pipelining dumps.
"""

import csv
import io
from pathlib import Path

from nxd_pipeline.schedules.schedule import Schedule, custom_schedule


def format_schedule(schedule: Schedule) -> str:
    """The schedule as CSV text, messages included if it has any."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.actions)


def parse_schedule(text: str, *, name: str = "custom") -> Schedule:
    """The schedule that CSV text gives; stages live on the rank in whose line they stand. Blank lines mean nothing.

    Raises:
        ValueError: the text is no CSV, a cell is no action, or the lines do not make a schedule; see
            `custom_schedule`.
    """
    try:
        rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(f"schedule {name!r} is no CSV: {error}; give a line per rank, an action per cell") from None
    return custom_schedule([[cell for cell in row if cell.strip()] for row in rows if row], name=name)


def write_schedule(schedule: Schedule, file: str | Path) -> None:
    """Writes the schedule as CSV."""
    Path(file).write_text(format_schedule(schedule), encoding="utf-8")


def read_schedule(file: str | Path) -> Schedule:
    """The schedule in a CSV file, named like the file; see `parse_schedule`."""
    return parse_schedule(Path(file).read_text(encoding="utf-8-sig"), name=Path(file).stem)
