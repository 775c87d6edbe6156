"""A failure of one stage ends the run on all stages, and all of them report the original error."""

from collections.abc import Iterator
from contextlib import contextmanager

from nxd_state import Group, PeerError, abort_group


class Failures:
    """The failures of a pipeline."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._first: str | None = None

    @contextmanager
    def end_all_ranks(self) -> Iterator[None]:
        """Where the body fails, the other ranks stop waiting, and raise the first failure.

        Raises:
            PeerError: the body failed, and another rank's failure was the first.
            RuntimeError: one failed before.
        """
        if self._first is not None:
            raise RuntimeError(
                f"this pipeline has ended: {self._first}. Its ranks no longer wait for each other; start the job "
                "again from a checkpoint"
            )
        try:
            yield
        except BaseException as error:
            mine = f"pipeline rank {self._group.rank} failed with {type(error).__name__}: {error}"
            self._first = abort_group(self._group, mine)
            if self._first == mine:
                raise
            raise PeerError(f"this rank stopped because {self._first}") from error
