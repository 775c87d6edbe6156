"""The result of a command (an exit code, data for `--json`, and lines for people) and its progress bar."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.errors import CheckpointError, printable
from nxd_ckpt.files import is_remote

EXIT_GOOD = 0
EXIT_DIFFERENT = 1
EXIT_TROUBLE = 2


@dataclass(frozen=True)
class Report:
    """The outcome of one command."""

    data: Any
    lines: Sequence[str]
    exit_code: int = EXIT_GOOD


def human_size(num_bytes: int) -> str:
    """Format bytes as "1.5 GiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Format rows with aligned columns."""
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]


def check_folder(path: str) -> None:
    """Check that a local folder exists, so that a typo is an error, not an empty list or a new folder.

    Raises:
        CheckpointError: the folder does not exist on this machine.
    """
    local = path.removeprefix("file://")
    if not is_remote(local) and not os.path.isdir(local):
        raise CheckpointError(f"{path} is not a folder" if os.path.exists(local) else f"{path!r} does not exist")


@contextmanager
def progress_bar(doing: str, total_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function to call with each name and its number of bytes when it is done.

    The bar is on stderr, if that is a terminal and tqdm (the extra `cli`) is installed.
    """
    try:
        from tqdm import tqdm  # noqa: PLC0415
    except ImportError:
        yield lambda name, num_bytes: None
        return
    with tqdm(
        total=total_bytes, desc=doing, unit="B", unit_scale=True, unit_divisor=1024, disable=None, file=sys.stderr
    ) as bar:

        def advance(name: str, num_bytes: int) -> None:
            bar.set_postfix_str(printable(name), refresh=False)
            bar.update(num_bytes)

        yield advance
