"""Taking turns on a host, so that not all of its ranks need their most memory at once."""

import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from nxd_state import all_gather_object, get_world_group

from nxd_trainer.api.together import together

T = TypeVar("T")


def in_turns(doing: str, make: Callable[[], T], at_a_time: int) -> T:
    """What `make` returns, called by at most `at_a_time` ranks of each host at once. Called by all ranks.

    Args:
        doing: for the messages of other ranks, as for `together`.
        make: must not communicate with ranks that may have another turn.
        at_a_time: ranks of a host.

    Raises:
        Exception: what `make` raised, on its rank.
        RuntimeError: `make` raised on another rank.
    """
    own_turn = int(os.environ.get("LOCAL_RANK", "0")) // at_a_time
    last_turn = max(all_gather_object(own_turn, get_world_group()))
    made: list[T] = []

    def make_in(turn: int) -> None:
        if turn == own_turn:
            made.append(make())

    for turn in range(last_turn + 1):
        together(doing, partial(make_in, turn))
    return made[0]
