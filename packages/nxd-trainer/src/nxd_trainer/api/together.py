"""Work of one rank that the others wait for: it fails on all ranks, or on none."""

from collections.abc import Callable
from typing import TypeVar

from nxd_state import all_gather_object, get_world_group

T = TypeVar("T")


def together(doing: str, act: Callable[[], T]) -> T:
    """What `act` returns, once every rank's has returned. Called by all ranks.

    Args:
        doing: for the messages of other ranks, such as "make its model".
        act: must not communicate: who raises in it does not take part.

    Raises:
        Exception: what `act` raised, on its rank.
        RuntimeError: `act` raised on another rank.
    """
    done: list[T] = []
    failure: Exception | None = None
    try:
        done.append(act())
    except Exception as error:  # raised below, when the others know
        failure = error
    world = get_world_group()
    failures = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}", world)
    if failure is not None:
        raise failure
    for rank, text in zip(world.ranks, failures, strict=True):
        if text is not None:
            raise RuntimeError(f"rank {rank} could not {doing}: {text}")
    return done[0]
