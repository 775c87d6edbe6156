"""A progress bar on stderr, if it is a terminal and tqdm (the extra `cli`) is installed; otherwise nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nxd_ckpt.errors import printable


@contextmanager
def progress_bar(doing: str, total_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Yields a function to call with each name and its number of bytes when it is done."""
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
