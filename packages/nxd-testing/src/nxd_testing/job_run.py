"""One job under way: wait for the ranks' answers, notice those that raise, die or hang, and let them all end.

`pool` decides which workers run the job, and what happens to them afterwards; `failure` words the error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait

from nxd_testing.deadlines import deadline
from nxd_testing.failure import FailedRank
from nxd_testing.messages import RELEASE, Raised, Success, TornDown, receive, send
from nxd_testing.worker_process import WorkerProcess

# How long ranks may take to end by themselves once another one has failed.
_GRACE_SECONDS = 10.0
_SECONDS_TO_TEAR_DOWN = 15.0


class JobRun:
    """One job under way: who has answered, who has failed, who is dead.

    Attributes:
        results: the pickled result of each rank whose function returned.
        failures: the failure of each failed rank.
        dead: the ranks whose process is gone and must be replaced.
    """

    def __init__(self, workers: Sequence[WorkerProcess], timeout: float) -> None:
        self._workers = dict(enumerate(workers))
        self._timeout = timeout
        self._released: set[int] = set()
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, FailedRank] = {}
        self.dead: set[int] = set()

    def collect(self) -> None:
        """Waits until every rank has returned, raised, died or timed out."""
        end = time.monotonic() + self._timeout
        waiting = dict(self._workers)
        while waiting and (remaining := end - time.monotonic()) > 0:
            for rank in self._answering(waiting, remaining):
                self._take_answer(rank, waiting.pop(rank))
            if self.failures:
                # Ranks that wait for one which has answered shall see its connections close.
                self._release(self._workers.keys() - waiting.keys())
                first_failure = min(failed.time for failed in self.failures.values())
                end = min(end, first_failure + deadline(_GRACE_SECONDS))
        self._stop(waiting)

    def finish(self) -> None:
        """Lets the ranks tear down their process groups, and waits for that."""
        tearing_down = {rank: worker for rank, worker in self._workers.items() if rank not in self.dead}
        self._release(tearing_down)
        end = time.monotonic() + deadline(_SECONDS_TO_TEAR_DOWN)
        while tearing_down and (remaining := end - time.monotonic()) > 0:
            for rank in self._answering(tearing_down, remaining):
                self._take_torn_down(rank, tearing_down.pop(rank))
        self._abort(tearing_down, "did not tear down its process groups")

    def _answering(self, workers: Mapping[int, WorkerProcess], seconds: float) -> list[int]:
        ready = wait([worker.connection for worker in workers.values()], seconds)
        return [rank for rank, worker in workers.items() if worker.connection in ready]

    def _take_answer(self, rank: int, worker: WorkerProcess) -> None:
        try:
            answer: Success | Raised = receive(worker.connection)
        except EOFError:
            self._fail(rank, worker.end(), worker.stacks(), dead=True)
            return
        if isinstance(answer, Success):
            self.results[rank] = answer.result
        else:
            self.failures[rank] = FailedRank(rank, answer.summary, answer.traceback, answer.time)

    def _take_torn_down(self, rank: int, worker: WorkerProcess) -> None:
        try:
            answer: TornDown = receive(worker.connection)
        except EOFError:
            self._fail(rank, worker.end(), worker.stacks(), dead=True)
            return
        if answer.error is not None and rank not in self.failures:
            self._fail(rank, "tearing down the process groups raised", answer.error)

    def _stop(self, workers: Mapping[int, WorkerProcess]) -> None:
        """Ends the ranks that did not answer in time."""
        if self.failures:
            summary = f"still running {deadline(_GRACE_SECONDS):.1f} s after another rank had failed"
            self._abort(workers, summary, stopped=True)
        else:
            self._abort(workers, f"still running after timeout={self._timeout:.1f} s")

    def _abort(self, workers: Mapping[int, WorkerProcess], summary: str, *, stopped: bool = False) -> None:
        for worker in workers.values():
            worker.abort()  # all at once: a rank that sees another one die is no longer where it hung
        for rank, worker in workers.items():
            worker.end()
            stacks = worker.stacks() or "(killed before it wrote its Python stacks)"
            self._fail(rank, summary, stacks, dead=True, stopped=stopped)

    def _fail(self, rank: int, summary: str, traceback: str, *, dead: bool = False, stopped: bool = False) -> None:
        self.failures.setdefault(rank, FailedRank(rank, summary, traceback, time.monotonic(), stopped))
        if dead:
            self.dead.add(rank)

    def _release(self, ranks: Iterable[int]) -> None:
        for rank in set(ranks) - self._released - self.dead:
            self._released.add(rank)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                send(self._workers[rank].connection, RELEASE)
