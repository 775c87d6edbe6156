"""A stage that fails ends its process, and so the connections that others wait on: here they learn whose error it was.

Nothing here ends a process. A program that catches the error and lives on leaves the others waiting until their
collectives time out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from nxd_state import Group
from torch.distributed.distributed_c10d import _get_default_store


@contextmanager
def first_failure_named(group: Group) -> Iterator[None]:
    """Raises errors of the body; where another rank of the group failed before, one that says which and why.

    Raises:
        RuntimeError: the body failed, and another rank's failure was the first.
    """
    try:
        yield
    except Exception as error:
        mine = f"pipeline rank {group.rank} failed with {type(error).__name__}: {error}"
        first = _first_failure(group, mine) if group.size > 1 else mine
        if first == mine:
            raise
        raise RuntimeError(f"this rank stopped because {first}") from error


def _first_failure(group: Group, mine: str) -> str:
    """What the first rank of the group that failed has said, which is `mine` if nobody has."""
    key = f"nxd_pipeline/first_failure/{','.join(map(str, group.ranks))}"
    try:
        return _get_default_store().compare_set(key, "", mine).decode()
    except dist.DistError:  # the rank that serves the store has ended
        return mine
