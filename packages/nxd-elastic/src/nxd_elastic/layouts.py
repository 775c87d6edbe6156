"""Chooses the layout for a number of ranks: plain arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nxd_state import ParallelDegrees


def parse_layouts(text: str) -> list[ParallelDegrees]:
    """Parse layouts in order of preference, such as `tp=2,pp=2;tp=2`; omitted degrees are 1.

    Raises:
        ValueError: the text has another form.
    """
    return [ParallelDegrees.parse(part) for part in text.split(";") if part.strip()]


def parse_range(text: str) -> tuple[int, int]:
    """Parse a minimum and a maximum number of ranks, such as `2:8`; `8` means `8:8`.

    Raises:
        ValueError: the text has another form.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most if colon else least]
    if not all(number.isdecimal() for number in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise ValueError(f"{text!r} is not a range of ranks; write MIN:MAX, such as 2:8")
    return int(numbers[0]), int(numbers[1])


def choose(
    layouts: Sequence[ParallelDegrees],
    num_ranks: int,
    *,
    least: int,
    most: int,
    accepts: Callable[[ParallelDegrees], bool],
) -> ParallelDegrees | None:
    """Return the first layout that fits, with as many replicas as possible; None if none fits.

    Args:
        layouts: layouts in order of preference.
        num_ranks: number of available ranks; some may remain unused.
        least: minimum number of ranks in a layout.
        most: maximum number of ranks in a layout.
        accepts: function that returns whether a layout suits the run, such as its global batch.
    """
    for layout in layouts:
        for dp in range(min(num_ranks, most) // layout.model_ranks, 0, -1):
            found = replace(layout, dp=dp)
            if found.world_size >= least and accepts(found):
                return found
    return None
