"""Work of one rank that the others wait for: it fails on all ranks, or on none."""

from collections.abc import Callable
from typing import TypeVar

from nxd_state import Group, all_gather_object, get_world_group

T = TypeVar("T")


def together(
    doing: str, act: Callable[[], T], *, group: Group | None = None, error_type: type[Exception] = RuntimeError
) -> T:
    """What `act` returns, once every rank's has returned. Called by all ranks of the group.

    Args:
        doing: for the messages of other ranks, such as "make its model".
        act: must not communicate: who raises in it does not take part.
        group: the ranks that wait for one another; all, unless given.
        error_type: of what is raised where `act` failed on another rank.

    Raises:
        Exception: what `act` raised, on its rank.
        RuntimeError: `act` raised on another rank; of `error_type`, where that is given.
    """
    done: list[T] = []
    failure: Exception | None = None
    try:
        done.append(act())
    except Exception as error:  # raised below, when the others know
        failure = error
    group = group or get_world_group()
    failures = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, text in zip(group.ranks, failures, strict=True):
        if text is not None:
            raise error_type(f"rank {rank} could not {doing}: {text}")
    return done[0]
