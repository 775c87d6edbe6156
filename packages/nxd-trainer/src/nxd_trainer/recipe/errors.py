"""The one error a recipe can raise. It carries every mistake found, so that a user mends them in one go."""

from __future__ import annotations

from collections.abc import Iterable


class RecipeError(ValueError):
    """A recipe that cannot be run.

    Attributes:
        mistakes: one line for each mistake, in the order of the recipe's keys.
    """

    def __init__(self, origin: str, mistakes: Iterable[str]):
        self.mistakes = tuple(mistakes)
        if len(self.mistakes) == 1:
            message = f"{origin}: {self.mistakes[0]}"
        else:
            lines = "".join(f"\n  - {mistake}" for mistake in self.mistakes)
            message = f"{origin}: {len(self.mistakes)} mistakes{lines}"
        super().__init__(message)
