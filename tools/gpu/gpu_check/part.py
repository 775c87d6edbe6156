"""Runs one part and prints its rows: `python -m gpu_check.part numbers cuda`, which `check.py` calls."""

import importlib
import sys

from gpu_check.rows import Row


def main(part: str, device: str) -> None:
    """Print each row as soon as it is known; a library that is missing here is a row that names it."""
    try:
        module = importlib.import_module(f"gpu_check.parts.{part}")
    except ModuleNotFoundError as missing:
        print(Row(part, "the part itself", "skipped", f"{missing.name} is not installed").to_line())
        return
    for row in module.rows(device):
        print(row.to_line(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
