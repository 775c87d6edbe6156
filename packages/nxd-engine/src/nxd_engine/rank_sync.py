"""Keeps ranks in step: failures are shared, calls are compared before they communicate, and ranks take turns."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from nxd_ckpt import Coordinator
from nxd_ckpt.coordinator import gather_from_every_rank
from nxd_state import (
    Group,
    PeerError,
    active_group,
    all_gather_object,
    attempt_on_every_rank,
    get_world_group,
    model_parallel_is_initialized,
)

T = TypeVar("T")


def is_first_replica() -> bool:
    """Whether this rank's data- and context-parallel replicas have it for their first, which speaks for them."""
    return not (active_group("dp").rank or active_group("cp").rank)


def agree(coordinator: Coordinator, doing: str, describe: Callable[[], Mapping[str, object]]) -> None:
    """Compare what the ranks are about to do. Called by all ranks.

    Args:
        coordinator: reaches the other ranks.
        doing: what all of them must be at, for messages as well.
        describe: checks this rank's arguments, and returns what must be the same on all ranks, by name.

    Raises:
        ValueError: `describe` raised on a rank, or something differs; the same text on all ranks.
    """
    of_ranks = gather_from_every_rank(coordinator, doing, lambda: {"call": doing, **describe()}, error_type=ValueError)
    problems = [
        f"{name} is {value!r} on rank 0 and {of_rank[name]!r} on rank {rank}"
        for name, value in of_ranks[0].items()
        for rank, of_rank in enumerate(of_ranks)
        if of_rank.get(name, value) != value
    ]
    if problems:
        more = f"; and {len(problems) - 1} more such" if len(problems) > 1 else ""
        raise ValueError(f"{of_ranks[0]['call']} failed: {problems[0]}{more}; call it alike on every rank")


def together(
    doing: str, act: Callable[[], T], *, group: Group | None = None, error_type: type[Exception] = PeerError
) -> T:
    """Call `act`; return its result once every rank's has returned. Called by all ranks of the group.

    Args:
        doing: for the messages of other ranks, such as "make its model".
        act: must not communicate: a rank that raises in it would not take part.
        group: the ranks that wait for one another; all, unless given.
        error_type: of what is raised where `act` failed on another rank.

    Raises:
        Exception: what `act` raised, on its rank.
        PeerError: `act` raised on another rank; of `error_type`, where that is given.
    """
    attempt = attempt_on_every_rank(act, group or get_world_group())
    if attempt.error is not None:
        raise attempt.error
    for rank, text in attempt.failures.items():
        raise error_type(f"rank {rank} could not {doing}: {text}")
    return attempt.results[0]


def on_all_ranks(doing: str, act: Callable[[], T]) -> T:
    """`together`, or just `act` where there are no ranks.

    Raises:
        Exception: what `act` raised, on its rank.
        PeerError: `act` raised on another rank.
    """
    return together(doing, act) if model_parallel_is_initialized() else act()


def in_turns(doing: str, make: Callable[[], T], at_a_time: int) -> T:
    """Call `make` on at most `at_a_time` ranks of each host at once; return its result. Called by all ranks.

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
