"""The ranks that a script sees in torch.distributed, where several ranks hold one replica of the model.

A script that divides its data by `torch.distributed.get_rank()` and `get_world_size()` is right at any layout if they
count replicas. So torch's default group, `torch.distributed.group.WORLD`, can be replaced by that of this rank's
replicas. What concerns all ranks of the job asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d

_hidden: dist.ProcessGroup | None = None  # the group of all ranks, while the script sees another one


def whole_world() -> dist.ProcessGroup | None:
    """Return the group of all ranks, whichever one the script sees; None if torch.distributed does not run."""
    return _hidden_world() or dist.group.WORLD


def rank_of_job() -> int:
    """Return this process's rank among all ranks; torch.distributed must run."""
    world = _hidden_world()
    return dist.get_rank() if world is None else world.rank()


def size_of_job() -> int:
    """Return the number of all ranks; torch.distributed must run."""
    world = _hidden_world()
    return dist.get_world_size() if world is None else world.size()


def store_of_job() -> dist.Store:
    """Return the store through which all ranks found each other; torch.distributed must run."""
    world = _hidden_world()
    store: dist.Store
    store = distributed_c10d._get_default_store() if world is None else distributed_c10d._world.pg_map[world][1]
    return store


def show_as_world(process_group: dist.ProcessGroup) -> None:
    """Let the script see a group of this rank as the world. It must not be used for anything else."""
    global _hidden  # noqa: PLW0603  (as torch has one world)
    _hidden = whole_world()
    dist.group.WORLD = process_group


def show_all_ranks() -> None:
    """Let the script see all ranks again."""
    global _hidden
    world, _hidden = _hidden_world(), None
    if world is not None:
        dist.group.WORLD = world


@contextmanager
def all_ranks() -> Iterator[None]:
    """Context in which torch's default group is that of all ranks: for code that asks torch for them."""
    seen = dist.group.WORLD
    if seen is whole_world():
        yield
        return
    dist.group.WORLD = whole_world()
    try:
        yield
    finally:
        if dist.is_initialized():  # the block may have ended it
            dist.group.WORLD = seen


def _hidden_world() -> dist.ProcessGroup | None:
    """Return the group of all ranks if the script sees another one; a script may have ended both."""
    return _hidden if _hidden is not None and _hidden in distributed_c10d._world.pg_map else None
