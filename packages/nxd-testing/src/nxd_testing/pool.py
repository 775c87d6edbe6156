"""The pool of warm worker processes, and `run_on_ranks`, which runs a function on the pool of this process.

A job of N ranks uses the first N workers, which are started when first needed and serve until this process
ends. They meet through one store that is served here, each job under its own prefix, so no job picks a port.
What the ranks do is in `worker`, how their answers are awaited in `job_run`.
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
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nxd_testing.deadlines import deadline
from nxd_testing.failure import RankFailure, prefix_output
from nxd_testing.job_run import JobRun
from nxd_testing.messages import Job, send
from nxd_testing.worker_process import WorkerProcess, import_path

if TYPE_CHECKING:
    from nxd_state.store_server import StoreServer

T = TypeVar("T")


def run_on_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Calls `fn(*args)` on each of `world_size` processes with torch.distributed initialised.

    Every job starts from the same state: one thread, float32, gradients on, random seed 0, this process's
    working directory and `sys.path`, and the environment that torchrun would set. Later jobs reuse the
    processes; modules imported there stay imported. What the ranks print is printed here when they are done,
    each line with its rank.

    Args:
        fn: any function, closures and lambdas included.
        world_size: the number of ranks.
        *args: picklable arguments, the same for every rank; `torch.distributed` tells the ranks apart.
        timeout: seconds until ranks still at work are ended and their Python stacks shown; scaled by `deadline`.
        backend: the backend of the process group.
        env: environment variables of this job. Later changes of this process's own are not seen by the ranks.

    Returns:
        What `fn` returned, by rank; tensors as detached CPU tensors.

    Raises:
        RankFailure: a rank raised, died or took too long; the next job is not affected.
        ValueError: `world_size` or `timeout` is not positive.
    """
    return _pool_of_this_process().run(fn, world_size, *args, timeout=timeout, backend=backend, env=env)


class RankPool:
    """Worker processes that are the ranks of one job after the other; ended by `shutdown` or by `with`."""

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
        """Runs one job; see `run_on_ranks`."""
        # Imported late because it needs the extra, and torch, which the pytest plugin must not import.
        from nxd_testing.serialization import dumps_call  # noqa: PLC0415

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
        """Ends the worker processes; a later job would start new ones."""
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
            from nxd_state.store_server import StoreServer  # noqa: PLC0415

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
            # A worker that died while idle shows when its answer is awaited.
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
def _pool_of_this_process() -> RankPool:
    pool = RankPool()
    atexit.register(pool.shutdown)
    return pool
