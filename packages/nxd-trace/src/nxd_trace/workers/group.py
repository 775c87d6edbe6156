"""The workers of one model, which start together and end together when one of them fails."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_state.processes import hold_standard_streams

from nxd_trace.errors import MissingMainGuardError, WorkerError
from nxd_trace.workers.communication import CALL, DONE, new_shared_file, receive, send_header, send_object
from nxd_trace.workers.fork_server import launch
from nxd_trace.workers.pickling import main_script

_SECONDS_TO_EXIT = 2.0
_SECONDS_FOR_OTHERS = 3.0  # for the other ranks to answer, once one has failed
_SECONDS_BETWEEN_CHECKS = 0.5  # of processes that have not answered


class ModelWorker:
    """A worker process, in its own session, so that Ctrl-C reaches only the parent.

    Attributes:
        connection: our end of the socket pair; it reads as closed once the process has ended.
    """

    def __init__(
        self,
        rank: int,
        replicas: int,
        expert_parallel_size: int,
        memory: int,
        store: int,
        environment: dict[str, str],
    ) -> None:
        self.rank = rank
        hold_standard_streams()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self.connection, theirs = socket.socketpair()
        stdin, self._stdin = os.pipe()  # nothing is written to it; it closes when this process dies
        descriptors = {
            "stdin": stdin,
            "connection": theirs.fileno(),
            "memory": memory,
            "store": store,
            "stacks": self._stacks.fileno(),
        }
        try:
            settings = {"main": main_script(), "replicas": replicas, "expert_parallel_size": expert_parallel_size}
            self._process = launch(settings, descriptors, environment)
        except BaseException:
            os.close(self._stdin)
            raise
        finally:
            os.close(stdin)
            theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def can_answer(self) -> bool:
        """Whether the process runs: it has neither ended nor been stopped."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal such as SIGSTOP; False if that is unknown."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended, or this is not Linux
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def describe_stop(self) -> str:
        """Describe that the process was stopped."""
        return (
            f"the worker, process {self.pid}, was stopped by a signal such as SIGSTOP (state T) and did not answer; it "
            "was ended. Find out what stops processes here, and call restart() to start new ones"
        )

    def describe_end(self) -> str:
        """Describe how a process with a closed connection ended, with its Python stacks if it wrote them."""
        code = self._process.wait(_SECONDS_TO_EXIT)
        if code is None:
            how = "closed its connection without exiting"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        stacks = os.pread(self._stacks.fileno(), os.fstat(self._stacks.fileno()).st_size, 0).decode(errors="replace")
        return f"{how}\n{stacks}" if stacks else how

    def end(self, timeout: float) -> None:
        """Wait until the process has exited by itself, at most `timeout` seconds; then kill it and its children."""
        self._process.wait(timeout)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_SECONDS_TO_EXIT)
        os.close(self._stdin)
        self._stacks.close()


class WorkerGroup:
    """One process per rank. The ranks of a replica form a tensor-parallel group, equal shards a data-parallel group.

    Not thread-safe; `TensorParallelModel` serializes the calls.

    Attributes:
        memory: descriptor of the shared memory for inputs and outputs.
        is_open: whether the processes can be called.
    """

    def __init__(self, size: int, replicas: int, expert_parallel_size: int) -> None:
        self.size = size
        self.memory = new_shared_file()
        # Unnamed memory and no port: whoever can write to the store can impersonate a rank, and every user can reach a
        # port.
        self._store = new_shared_file()
        self._selector = selectors.DefaultSelector()
        self._workers: list[ModelWorker] = []
        self.is_open = True
        try:
            for rank in range(size):
                worker = ModelWorker(
                    rank, replicas, expert_parallel_size, self.memory, self._store, self._environment(rank)
                )
                self._workers.append(worker)
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except BaseException:
            self._shut(0.0)
            raise

    @property
    def can_answer(self) -> bool:
        """Whether all processes run."""
        return all(worker.can_answer for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [worker.pid for worker in self._workers]

    def call(self, program: int) -> None:
        """Run a program on every rank, on the inputs in shared memory."""
        self._exchange(range(self.size), lambda rank, to: send_header(to, CALL, program), "a call")

    def ask_all(self, request: Any, what: str) -> list[Any]:
        """Send a request to every rank; returns the answers by rank. `what` describes the request in errors."""
        answers = self.ask(dict.fromkeys(range(self.size), request), what)
        return [answers[rank] for rank in range(self.size)]

    def ask(self, requests: Mapping[int, Any], what: str) -> dict[int, Any]:
        """Send requests to some ranks; returns the answers by rank."""
        return self._exchange(list(requests), lambda rank, to: send_object(to, requests[rank]), what)

    def close(self) -> None:
        """End the processes; idle ones exit by themselves."""
        self._shut(_SECONDS_TO_EXIT)

    def _shut(self, timeout: float) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._selector.close()
        for worker in self._workers:
            worker.connection.close()  # an idle worker exits
        for worker in self._workers:
            worker.end(timeout)
        os.close(self.memory)
        os.close(self._store)

    def _exchange(self, ranks: Sequence[int], send: Callable[[int, socket.socket], None], what: str) -> dict[int, Any]:
        """Send each of these ranks a message, and collect the answers.

        Any interruption ends the group, because the progress of the ranks is then unknown.
        """
        try:
            with contextlib.suppress(OSError):  # a process that has ended is found while collecting answers
                for rank in ranks:
                    send(rank, self._workers[rank].connection)
            answers, errors, dead = self._collect(set(ranks))
        except BaseException:
            self._shut(0.0)
            raise
        if not errors:
            return answers
        silent = set(ranks) - answers.keys() - errors.keys()
        if dead or silent:
            self._shut(0.0)
        raise WorkerError(_describe_errors(errors, silent, self.size, what))

    def _collect(self, ranks: set[int]) -> tuple[dict[int, Any], dict[int, str], bool]:
        """Return values and errors by rank, and whether a rank has died or is stopped.

        Once a rank has failed, the others get a moment to answer. If they do, the group continues: an input that every
        rank rejects ends nothing. If a rank has died, or waits in a collective for one that raised, all are ended. The
        same holds if a rank is found stopped twice in a row, because it may never continue.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        dead = False
        deadline: float | None = None
        stopped: set[int] = set()
        while silent := ranks - answers.keys() - errors.keys():
            timeout = _SECONDS_BETWEEN_CHECKS if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._selector.select(timeout)
            if not ready and deadline is not None:
                break
            if not ready:
                stopped_before, stopped = stopped, {rank for rank in silent if self._workers[rank].is_stopped}
                if lasting := stopped_before & stopped:
                    return answers, {rank: self._workers[rank].describe_stop() for rank in lasting}, True
            for key, _ in ready:
                worker: ModelWorker = key.data
                try:
                    kind, _, answer = receive(worker.connection)
                except (EOFError, OSError):
                    self._selector.unregister(worker.connection)
                    dead = True
                    errors[worker.rank] = f"the worker {worker.describe_end()}"
                    continue
                if kind == DONE:
                    answers[worker.rank] = None
                elif answer.lacks_main_guard:
                    raise MissingMainGuardError(answer.error)
                elif answer.storage_error is not None:
                    raise answer.storage_error
                elif answer.error:
                    errors[worker.rank] = f"{answer.error}\n{answer.traceback}"
                else:
                    answers[worker.rank] = answer.value
            if errors and deadline is None:
                deadline = time.monotonic() + _SECONDS_FOR_OTHERS
        return answers, errors, dead

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the environment with torchrun's variables and an equal share of the cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return {
            "OMP_NUM_THREADS": str(max(1, cores // self.size)),
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
        }


def _describe_errors(errors: Mapping[int, str], silent: set[int], size: int, what: str) -> str:
    """Describe each error once, with its ranks."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        by_text.setdefault(text, []).append(rank)
    parts = [f"rank {', '.join(map(str, ranks))} of {size} in {what}: {text}" for text, ranks in by_text.items()]
    if silent:
        parts.append(f"rank {', '.join(map(str, sorted(silent)))} was still waiting for the others and was ended")
    return "\n".join(parts)
