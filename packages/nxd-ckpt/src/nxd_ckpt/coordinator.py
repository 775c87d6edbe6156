"""Communication between the ranks of one save or load: gather small objects, and fail together.

Ranks can be a torch process group, a single process, or any object with the three members of `Coordinator`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist

from nxd_ckpt.arguments import default_timeout, is_timeout
from nxd_ckpt.errors import CheckpointError, one_line
from nxd_ckpt.messages import expect, parsed
from nxd_ckpt.store_coordinator import StoreCoordinator, coordinator_of_group, leave_default_group

Result = TypeVar("Result")


@runtime_checkable
class Coordinator(Protocol):
    """The interface to the other ranks that saving and loading need."""

    @property
    def rank(self) -> int:
        """Number of this rank, `0 <= rank < world_size`."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; raises if a rank is gone.

        Values must be JSON-serializable; tuples may come back as lists.
        """


class ThisProcess:
    """A world of one rank, even if torch.distributed has more."""

    rank = 0
    world_size = 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `Coordinator`."""
        return [value]


def coordinator_for(
    process_group: "dist.ProcessGroup | Coordinator | None", timeout: float | None = None
) -> Coordinator:
    """Return the coordinator of a process group. None means torch's default group if initialized, else a world of one.

    Args:
        process_group: the ranks; a Coordinator is returned unchanged.
        timeout: seconds to wait for other ranks of a process group; if it is invalid, the default is used, so that the
            other ranks can be told when all arguments are checked.

    Raises:
        ValueError: it is neither a group nor a Coordinator, or this process is not a member of the group.
    """
    if isinstance(process_group, Coordinator):
        return process_group
    if not (process_group is None or isinstance(process_group, dist.ProcessGroup)):
        raise ValueError(
            f"process_group={process_group!r} is a {type(process_group).__name__}; pass a torch process group, or an "
            "object with rank, world_size and all_gather_object"
        )
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return ThisProcess()
    if timeout is None or not is_timeout(timeout):
        timeout = default_timeout()
    return coordinator_of_group(process_group, timeout)


@contextmanager
def abandoned_on_error(coordinator: Coordinator) -> Iterator[None]:
    """Report an exception that leaves the block, such as an interrupt, to ranks that may wait for this one."""
    try:
        yield
    except BaseException as error:
        if isinstance(coordinator, StoreCoordinator):
            coordinator.abandon(f"left: {one_line(error)}")
        raise


@contextmanager
def announced_to_waiting_ranks() -> Iterator[None]:
    """Report an error in a program's work between calls of this package to all ranks.

    Ranks of torch's default process group that wait for this one, now or later, then raise as quickly as if its process
    had ended, although it may end late or never. This holds until this rank saves or loads again.
    """
    try:
        yield
    except BaseException as error:
        leave_default_group(f"ended its work: {one_line(error)}")
        raise


def on_every_rank(
    coordinator: Coordinator, doing: str, action: Callable[[], Result], *, error_type: type[Exception] = CheckpointError
) -> Result:
    """Run `action` here, wait until all ranks have run theirs, and return this rank's result.

    Raises:
        error_type: on every rank, with the same text, if the action raised on any of them.
    """
    results: list[Result] = []
    gather_from_every_rank(coordinator, doing, lambda: results.append(action()), error_type=error_type)
    return results[0]


def on_rank_zero(coordinator: Coordinator, doing: str, action: Callable[[], Result]) -> Result:
    """Run `action` only on rank 0 and give every rank its JSON-serializable result, or its error."""
    results = gather_from_every_rank(coordinator, doing, action if coordinator.rank == 0 else lambda: None)
    return results[0]  # type: ignore[return-value]


def gather_from_every_rank(
    coordinator: Coordinator, doing: str, action: Callable[[], Result], *, error_type: type[Exception] = CheckpointError
) -> list[Result]:
    """Run `action` on every rank and return all results in rank order; raises the errors of `on_every_rank`.

    Results must be JSON-serializable; tuples may come back as lists.
    """
    result: Result | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:  # any error: the other ranks must learn of it instead of waiting
        cause = error
    own = (result, None if cause is None else _describe(cause))
    outcomes = parsed(coordinator.all_gather_object(own), _outcome, doing)
    failures = [(rank, failure) for rank, (_, failure) in enumerate(outcomes) if failure is not None]
    if failures:
        raise error_type(f"{doing} failed{_listed(failures, coordinator.world_size)}") from cause
    return [result for result, _ in outcomes]


def _outcome(message: Any) -> tuple[Any, str | None]:
    result, failure = message
    expect(failure is None or isinstance(failure, str), f"the failure {failure!r}")
    return result, failure


def _listed(failures: list[tuple[int, str]], world_size: int) -> str:
    if world_size == 1:
        return f": {failures[0][1]}"
    texts = {failure for _, failure in failures}
    if len(failures) > 1 and len(texts) == 1:  # such as a disk that is full for all of them
        return f" on {len(failures)} of {world_size} ranks: {texts.pop()}"
    lines = [f"  rank {rank}: {failure}" for rank, failure in failures[:8]]
    if len(failures) > 8:
        more = len(failures) - 8
        lines.append(f"  and {more} more rank{'s' if more > 1 else ''}")
    return f" on {len(failures)} of {world_size} ranks\n" + "\n".join(lines)


def _describe(error: Exception) -> str:
    """Format an error; for errors of other packages include the type. File names in it may not be valid Unicode."""
    own = isinstance(error, CheckpointError) or type(error) is ValueError
    text = str(error) if own else f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode()
