"""Work that fails on every rank where it fails on one, for models with ranks and without."""

from collections.abc import Callable
from typing import TypeVar

from nxd_state import model_parallel_is_initialized

from nxd_trainer.api.together import together

T = TypeVar("T")


def on_all_ranks(doing: str, act: Callable[[], T]) -> T:
    """`together`, or just `act` where there are no ranks.

    Raises:
        Exception: what `act` raised, on its rank.
        RuntimeError: `act` raised on another rank.
    """
    return together(doing, act) if model_parallel_is_initialized() else act()
