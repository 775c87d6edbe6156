"""Taking turns on a host, so that not all of its ranks need their most memory at once."""

import os
from collections.abc import Callable
from typing import TypeVar

from nxd_state import all_gather_object, get_world_group

T = TypeVar("T")


def in_turns(make: Callable[[], T], at_a_time: int) -> T:
    """What `make` returns, called by at most `at_a_time` ranks of each host at once. Called by all ranks.

    Args:
        make: must not communicate with ranks that may have another turn.
        at_a_time: ranks of a host.

    Raises:
        Exception: what `make` raised, on its rank.
        RuntimeError: `make` raised on another rank.
    """
    own_turn = int(os.environ.get("LOCAL_RANK", "0")) // at_a_time
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world = get_world_group()
    turns = max(all_gather_object(-(-ranks_here // at_a_time), world))
    made: list[T] = []
    for turn in range(turns):
        failure: Exception | None = None
        if turn == own_turn:
            try:
                made.append(make())
            except Exception as error:  # raised below, when the others know
                failure = error
        failures = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}", world)
        if failure is not None:
            raise failure
        for rank, text in zip(world.ranks, failures, strict=True):
            if text is not None:
                raise RuntimeError(f"rank {rank} could not make its model: {text}")
    return made[0]
