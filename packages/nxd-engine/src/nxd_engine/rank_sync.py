"""Keeps ranks in step: failures are shared, calls are compared before they communicate, and ranks take turns."""

import os
from collections.abc import Callable, Mapping, Sequence
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
    """Whether this rank is the first of its data- and context-parallel replicas."""
    return not (active_group("dp").rank or active_group("cp").rank)


def agree(coordinator: Coordinator, doing: str, describe: Callable[[], Mapping[str, object]]) -> None:
    """Check that all ranks make the same call. Called by all ranks.

    Args:
        coordinator: the coordinator of the ranks.
        doing: the operation, which must be the same on all ranks; also for messages.
        describe: checks this rank's arguments, and returns by name the values that must be the same on all ranks.

    Raises:
        ValueError: `describe` raised on a rank, or something differs; the same text on all ranks.
    """
    check_same_call(
        gather_from_every_rank(coordinator, doing, lambda: {"call": doing, **describe()}, error_type=ValueError)
    )


def check_same_call(of_ranks: Sequence[Mapping[str, object]]) -> None:
    """Compare the calls that all ranks describe, by name of each argument; "call" names the operation.

    Raises:
        ValueError: something differs; the same text on all ranks.
    """
    problems = [
        f"{name} is {value!r} on rank 0 and {of_rank[name]!r} on rank {rank}"
        for name, value in of_ranks[0].items()
        for rank, of_rank in enumerate(of_ranks)
        if of_rank.get(name, value) != value
    ]
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ValueError(f"{of_ranks[0]['call']} failed: {problems[0]}{more}; call it the same way on every rank")


def run_or_raise_peer_error(
    doing: str, act: Callable[[], T], *, group: Group | None = None, error_type: type[Exception] = PeerError
) -> T:
    """Call `act`; return its result once it has returned on every rank. Called by all ranks of the group.

    A rank on which `act` fails raises its own exception, with type and traceback, and the other ranks a `PeerError`;
    `nxd_state.on_every_rank` raises one text on all ranks instead. Without a group, this just calls `act` if model
    parallelism is not initialized.

    Args:
        doing: the activity, for the messages of other ranks, such as "making the model".
        act: the function; it must not communicate, since a rank that raises in it would not take part.
        group: the ranks that wait for one another; all ranks by default.
        error_type: the exception to raise if `act` failed on another rank.

    Raises:
        Exception: the exception of `act`, on its rank.
        PeerError: `act` raised on another rank; of `error_type` if given.
    """
    if group is None and not model_parallel_is_initialized():
        return act()
    attempt = attempt_on_every_rank(act, group or get_world_group())
    if attempt.error is not None:
        raise attempt.error
    for rank, text in attempt.failures.items():
        raise error_type(f"{doing} failed on rank {rank}: {text}")
    return attempt.results[0]


def in_turns(doing: str, make: Callable[[], T], at_a_time: int) -> T:
    """Call `make` on at most `at_a_time` ranks of each host at once; return its result. Called by all ranks.

    Args:
        doing: the activity, for the messages of other ranks, as for `run_or_raise_peer_error`.
        make: the function; it must not communicate with ranks that may have another turn.
        at_a_time: ranks per host that run it at once.

    Raises:
        Exception: the exception of `make`, on its rank.
        RuntimeError: `make` raised on another rank.
    """
    own_turn = int(os.environ.get("LOCAL_RANK", "0")) // at_a_time
    last_turn = max(all_gather_object(own_turn, get_world_group()))
    made: list[T] = []

    def make_in(turn: int) -> None:
        if turn == own_turn:
            made.append(make())

    for turn in range(last_turn + 1):
        run_or_raise_peer_error(doing, partial(make_in, turn))
    return made[0]
