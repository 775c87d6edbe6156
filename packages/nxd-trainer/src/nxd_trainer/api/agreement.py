"""Whether all ranks call alike: what differs would leave some of them waiting in a call that the others never make."""

from collections.abc import Callable, Mapping

from nxd_ckpt import Coordinator
from nxd_ckpt.coordinator import gather_from_every_rank


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
