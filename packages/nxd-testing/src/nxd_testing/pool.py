"""The pool of warm worker processes, and `run_on_ranks`, which runs a function on the pool of this process.

A job of N ranks uses the first N workers, which start when they are first needed and run until this process ends. They
rendezvous in one store served here, with a prefix per job, so no job picks a port. The workers' side is in `worker`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self, TypeVar

from nxd_state.store_server import StoreServer

from nxd_testing.failure import FailedRank, RankFailure, deadline, prefix_output
from nxd_testing.messages import RELEASE, Job, Raised, Success, TornDown, dumps_call, receive, send
from nxd_testing.worker_process import WorkerProcess, import_path

# How long ranks may keep running once another one has failed.
_GRACE_SECONDS = 10.0
_SECONDS_TO_TEAR_DOWN = 15.0


class JobRun:
    """One running job: collects the ranks' results and detects ranks that raise, die or hang.

    Attributes:
        results: the pickled result of each rank whose function returned.
        failures: the failure of each failed rank.
        dead: the ranks whose process ended and must be replaced.
    """

    def __init__(self, workers: Sequence[WorkerProcess], timeout: float) -> None:
        self._workers = dict(enumerate(workers))
        self._timeout = timeout
        self._released: set[int] = set()
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, FailedRank] = {}
        self.dead: set[int] = set()

    def collect(self) -> None:
        """Wait until every rank has returned, raised, died or timed out."""
        end = time.monotonic() + self._timeout
        waiting = dict(self._workers)
        while waiting and (remaining := end - time.monotonic()) > 0:
            for rank in self._answering(waiting, remaining):
                self._take_answer(rank, waiting.pop(rank))
            if self.failures:
                # Ranks that wait for one that has answered see its connections close.
                self._release(self._workers.keys() - waiting.keys())
                first_failure = min(failed.time for failed in self.failures.values())
                end = min(end, first_failure + deadline(_GRACE_SECONDS))
        self._stop(waiting)

    def finish(self) -> None:
        """Let the ranks destroy their process groups, and wait for that."""
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
        """Stop the ranks that did not answer in time."""
        if self.failures:
            summary = f"still running {deadline(_GRACE_SECONDS):.1f} s after another rank had failed"
            self._abort(workers, summary, stopped=True)
        else:
            self._abort(workers, f"still running after timeout={self._timeout:.1f} s")

    def _abort(self, workers: Mapping[int, WorkerProcess], summary: str, *, stopped: bool = False) -> None:
        for worker in workers.values():
            worker.abort()  # all at once: a rank that sees another one die leaves the place where it hung
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


T = TypeVar("T")


def run_on_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call `fn(*args)` on each of `world_size` processes with torch.distributed initialized.

    Every job starts from the same state: one thread, float32, gradients enabled, random seed 0, this process's working
    directory and `sys.path`, and the environment that torchrun sets. Later jobs reuse the processes, including imported
    modules. The ranks' output is printed when they are done, each line with its rank.

    Args:
        fn: any function, including closures and lambdas.
        world_size: number of ranks.
        *args: picklable arguments, the same for every rank.
        timeout: seconds until running ranks are stopped and their Python stacks shown; scaled by `deadline`.
        backend: backend of the process group.
        env: environment variables of this job; ranks do not see later changes of this process's environment.

    Returns:
        The results by rank, with tensors as detached CPU tensors.

    Raises:
        RankFailure: a rank raised, died or took too long; the next job is not affected.
        ValueError: `world_size` or `timeout` is not positive.
    """
    return shared_pool("ranks").run(fn, world_size, *args, timeout=timeout, backend=backend, env=env)


class RankPool:
    """Worker processes that serve as the ranks of successive jobs; `shutdown` or `with` ends them."""

    def __init__(self) -> None:
        self._workers: list[WorkerProcess] = []
        self._store: StoreServer | None = None
        self._number_of_jobs = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def run(
        self,
        fn: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Run one job; see `run_on_ranks`."""
        if world_size < 1:
            raise ValueError(f"world_size={world_size} ranks cannot run anything; use 1 or more")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} s leaves no time to run; use a positive number of seconds")
        call = dumps_call(fn, args)
        with self._lock:
            try:
                workers = self._ready_workers(world_size)
                self._send_jobs(workers, call, backend, env or {})
                run = JobRun(workers, deadline(timeout))
                run.collect()
                run.finish()
            except BaseException:  # an interrupt: the state of the ranks is unknown
                self._end_all()
                raise
            outputs = {rank: text for rank, worker in enumerate(workers) if (text := worker.take_output())}
            for rank in run.dead:
                self._workers[rank].forget()
                self._workers[rank] = WorkerProcess(self._store_port())
        if run.failures:
            raise RankFailure(list(run.failures.values()), world_size, outputs)
        for rank, text in outputs.items():
            sys.stdout.write(prefix_output(rank, text))
        return [pickle.loads(run.results[rank]) for rank in range(world_size)]

    def shutdown(self) -> None:
        """End the worker processes; a later job starts new ones."""
        with self._lock:
            for worker in self._workers:
                worker.close()
            for worker in self._workers:
                worker.end()
                worker.forget()
            self._workers = []
            if self._store is not None:
                self._store.close()
                self._store = None

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.forget()
        self._workers = []

    def _ready_workers(self, world_size: int) -> list[WorkerProcess]:
        while len(self._workers) < world_size:
            self._workers.append(WorkerProcess(self._store_port()))
        for worker in self._workers[:world_size]:
            worker.wait_until_ready()
        return self._workers[:world_size]

    def _store_port(self) -> int:
        if self._store is None:
            self._store = StoreServer(socket.create_server(("127.0.0.1", 0)))
        return self._store.port

    def _send_jobs(self, workers: list[WorkerProcess], call: bytes, backend: str, env: Mapping[str, str]) -> None:
        self._number_of_jobs += 1
        for rank, worker in enumerate(workers):
            job = Job(
                number=self._number_of_jobs,
                rank=rank,
                world_size=len(workers),
                backend=backend,
                env=self._environment(rank, len(workers)) | dict(env),
                working_directory=os.getcwd(),
                import_path=import_path(),
                call=call,
            )
            # A worker that died while idle is detected when its answer is awaited.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                send(worker.connection, job)

    def _environment(self, rank: int, world_size: int) -> dict[str, str]:
        """The variables that torchrun sets."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store_port()),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._number_of_jobs),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }


@functools.cache
def shared_pool(purpose: str) -> RankPool:
    """Return this process's pool for one purpose; processes of different devices cannot be shared."""
    pool = RankPool()
    atexit.register(pool.shutdown)
    return pool
