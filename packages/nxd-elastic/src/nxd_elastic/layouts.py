"""Which layout a number of ranks gets: plain arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nxd_state import ParallelDegrees


def parse_layouts(text: str) -> list[ParallelDegrees]:
    """Layouts in order of preference, of `tp=2,pp=2;tp=2`: degrees that are left out are 1.

    Raises:
        ValueError: it is something else.
    """
    return [ParallelDegrees.parse(part) for part in text.split(";") if part.strip()]


def parse_range(text: str) -> tuple[int, int]:
    """The least and the most ranks of `2:8`; `8` is `8:8`.

    Raises:
        ValueError: it is something else.
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
    """The first layout that fits, with as many replicas as do; None if none fits.

    Args:
        layouts: in order of preference.
        num_ranks: that there are; some may be left over.
        least: ranks that a layout must use.
        most: ranks that it may use.
        accepts: whether it suits the run, such as the global batch.
    """
    for layout in layouts:
        for dp in range(min(num_ranks, most) // layout.model_ranks, 0, -1):
            found = replace(layout, dp=dp)
            if found.world_size >= least and accepts(found):
                return found
    return None
