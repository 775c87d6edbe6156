"""Which layout a number of ranks gets: plain arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True)
class Layout:
    """The degrees of a mesh but for data parallelism, which takes the ranks that they leave."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks of one replica of the model."""
        return self.tp * self.pp * self.cp

    def __str__(self) -> str:
        degrees = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1 or name == "tp")


class Fit(NamedTuple):
    """A layout and how many replicas of the model it has."""

    layout: Layout
    dp: int

    @property
    def world_size(self) -> int:
        """Ranks that it needs."""
        return self.layout.model_ranks * self.dp


def parse_layouts(text: str) -> list[Layout]:
    """Layouts in order of preference, of `tp=2,pp=2;tp=2`: degrees that are left out are 1.

    Raises:
        ValueError: it is something else.
    """
    return [_parse_layout(part) for part in text.split(";") if part.strip()]


def _parse_layout(text: str) -> Layout:
    known = [field.name for field in fields(Layout)]
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in known or name in degrees or not value.strip().isdecimal() or int(value) < 1:
            raise ValueError(f"{part!r} in the layout {text!r} is no degree; write such as tp=2,pp=2 (of {known})")
        degrees[name] = int(value)
    return Layout(**degrees)


def parse_range(text: str) -> tuple[int, int]:
    """The least and the most ranks of `2:8`; `8` is `8:8`.

    Raises:
        ValueError: it is something else.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most if colon else least]
    if not all(number.isdecimal() for number in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise ValueError(f"{text!r} is no range of ranks; write MIN:MAX, such as 2:8")
    return int(numbers[0]), int(numbers[1])


def choose(
    layouts: Sequence[Layout], num_ranks: int, *, least: int, most: int, accepts: Callable[[Fit], bool]
) -> Fit | None:
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
            fit = Fit(layout, dp)
            if fit.world_size >= least and accepts(fit):
                return fit
    return None
