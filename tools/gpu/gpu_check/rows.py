"""The rows that parts print, one line of JSON each, and the table of them all."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, Self

Outcome = Literal["ok", "wrong", "failed", "skipped", "measured"]
PREFIX = "ROW "  # so that other output of a part is not taken for a row


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        part: the module of `gpu_check.parts`.
        case: what was tried, such as "llama TP 2 bfloat16".
        outcome: "ok" or "wrong" of a check, "measured" of a figure, "failed" with an error, "skipped" with a reason.
        detail: the error, its bound, the figure and its unit.
    """

    part: str
    case: str
    outcome: Outcome
    detail: str = ""

    def to_line(self) -> str:
        """The row as a line that `of_line` reads."""
        return PREFIX + json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Self | None:
        """The row of a line; None if the line is other output."""
        return cls(**json.loads(line.removeprefix(PREFIX))) if line.startswith(PREFIX) else None


def check(part: str, case: str, error: float, bound: float) -> Row:
    """A row that is ok if the error is within its bound; a NaN is not."""
    return Row(part, case, "ok" if error <= bound else "wrong", f"error {error:.1e}, bound {bound:.0e}")


def table(rows: Iterable[Row]) -> str:
    """The rows under each other, in columns."""
    cells = [(row.part, row.case, row.outcome, row.detail) for row in rows]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
