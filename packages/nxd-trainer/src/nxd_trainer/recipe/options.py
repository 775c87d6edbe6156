"""How one key of a recipe is declared: a dataclass field with a help text and the range of its numbers.

Reading a value of the declared type from a file or a command line is in values.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range a number (or each number of a list) must lie in; None is unbounded on that side."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def admit(self, number: float) -> bool:
        """Whether `number` lies in the range. Not-a-number never does."""
        return (
            number == number  # noqa: PLR0124 (false for not-a-number only)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        limits = (
            (self.at_least, "at least"),
            (self.above, "above"),
            (self.at_most, "at most"),
            (self.below, "below"),
        )
        return " and ".join(f"{word} {limit:g}" for limit, word in limits if limit is not None)


def option(
    default: Value,
    description: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Value:
    """Declare a recipe key: a dataclass field with its default, help text and range.

    An optional key (`T | None`) must default to None: a saved recipe leaves unset keys out.
    """
    bounds = Bounds(at_least=at_least, above=above, at_most=at_most, below=below)
    # A dataclass field is declared by assigning what `field` returns, which type checkers see as the default.
    field: Any = dataclasses.field(default=default, metadata={"description": description, "bounds": bounds})
    declared: Value = field
    return declared
