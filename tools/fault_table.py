"""What `nxd train` and `nxd serve` do when something fails: makes the table of the docs from a run of the tests.

    python tools/fault_table.py                       all faults: an hour or so on two cores
    python tools/fault_table.py -k "save and SIGSTOP"   some, printed only
    python tools/fault_table.py --write               all, and the table put into docs/reference/failures.md

The slow tests of tests-integration/cli/test_rank_failures.py and test_serve_failures.py are run. Each tells how long
the processes took to end, the exit code, the first line shown and the files left. That no process is left, they assert.
`--rows FILE` reads what an earlier run of the tests has told, with NXD_FAULT_TABLE=FILE, instead of running them.
Leaves nothing behind but, with --write, that document.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "failures.md"
TESTS = ["tests-integration/cli/test_rank_failures.py", "tests-integration/cli/test_serve_failures.py"]
BEGIN = "<!-- made by tools/fault_table.py: begin -->"
END = "<!-- made by tools/fault_table.py: end -->"
FAULTS = ["exception", "kill -9", "SIGSTOP", "SIGTERM", "Ctrl-C twice", "launcher -9", "full disk", "read-only output"]
DURING = {
    "tp": "TP",
    "pp": "PP",
    "zero1": "ZeRO-1",
    "zero3": "ZeRO-3",
    "save": "save",
    "background save": "background save",
    "serve": "serve",
}
LONGEST_LINE = 140  # characters
OF_THIS_MACHINE = re.compile(r"/\S+/(?:site-packages|src)/| of binary: \S+")
HEAD_OF_TORCHRUN = re.compile(r"[EW]\d{4} \S+ +\d+ \S+\] ")  # time and process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="EXPRESSION", help="of pytest: only tests that fit")
    parser.add_argument("--rows", type=Path, help="what a run of the tests has told; unset: run them")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args()
    if options.rows is not None:
        table = make_table(read_rows(options.rows))
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder, "rows.jsonl")
            command = [sys.executable, "-m", "pytest", "-q", *TESTS, *(["-k", options.k] if options.k else [])]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"NXD_FAULT_TABLE": str(rows)}, check=True)
            table = make_table(read_rows(rows))
    if options.write:
        put_into(DOCUMENT, table)
    else:
        print(table)
    return 0


def read_rows(file: Path) -> list[dict[str, Any]]:
    """One for each cell; of a cell that was run again, the last."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    last = {(row["fault"], row["during"], row["ranks"]): row for row in rows}
    return sorted(last.values(), key=lambda row: (FAULTS.index(row["fault"]), list(DURING).index(row["during"])))


def make_table(rows: Iterable[dict[str, Any]]) -> str:
    """As Markdown, a line for each row."""
    lines = [
        "| fault | during | ranks | seconds | exit code | first line shown | files left |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        names = ", ".join(f"`{name}`" for name in _without_numbers(row["files"])) or "none"
        cells = [row["fault"], DURING[row["during"]], row["ranks"], row["seconds"], row["exit code"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {_as_code(row['first line'])} | {names} |")
    return "\n".join(lines)


def _as_code(line: str) -> str:
    line = OF_THIS_MACHINE.sub("", HEAD_OF_TORCHRUN.sub("torchrun: ", line))
    shown = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."
    return f"`{shown.replace('|', '/').replace('`', '')}`" if shown else "nothing"


def _without_numbers(names: Sequence[str]) -> list[str]:
    return sorted({name.partition("_")[0] + "_*" if "_" in name else name for name in names})


def put_into(document: Path, table: str) -> None:
    """Replace what stands between the markers.

    Raises:
        ValueError: the document lacks them.
    """
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no lines {BEGIN!r} and {END!r}; add them where the table is to be")
    document.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
