"""All workers of one model: started, talked to through sockets, and ended together when one of them fails."""

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
from nxd_trace.workers.communication import CALL, DONE, Answer, new_shared_file, receive, send_header, send_object
from nxd_trace.workers.fork_server import launch
from nxd_trace.workers.pickling import main_script

_SECONDS_TO_LEAVE = 2.0


class WorkerProcess:
    """A process in its own session, so that Ctrl-C reaches the parent alone.

    Args:
        rank: rank of the worker.
        replicas: number of replicas of the model, over all workers.
        expert_parallel_size: workers that split its experts.
        memory: descriptor of the memory that it shares with this process.
        store: descriptor of the memory that the ranks meet in.
        environment: its environment variables.

    Attributes:
        connection: our end of the socket pair; it reads as closed once the process is gone.
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
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.connection, theirs = socket.socketpair()
        stdin, self._stdin = os.pipe()  # never written to: it closes when this process dies
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
        """The process's id."""
        return self._process.pid

    @property
    def can_answer(self) -> bool:
        """Whether it has not ended, and is not stopped."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has halted it, and it waits for SIGCONT; never where that is unknown."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended, or this is not Linux
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def describe_stop(self) -> str:
        """That the process is stopped, and why it cannot be waited for."""
        return (
            f"the worker, process {self.pid}, was stopped by a signal such as SIGSTOP (state T) and did not answer; it "
            "was ended. Find out what stops processes here, and call restart() to start new ones"
        )

    def describe_end(self) -> str:
        """How a process whose connection is closed ended, with its Python stacks if it wrote them."""
        code = self._process.wait(_SECONDS_TO_LEAVE)
        if code is None:
            how = "closed its connection without exiting"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        stacks = os.pread(self._stacks.fileno(), os.fstat(self._stacks.fileno()).st_size, 0).decode(errors="replace")
        return f"{how}\n{stacks}" if stacks else how

    def close(self) -> None:
        """Ask an idle process to leave; `end` waits for it."""
        self.connection.close()

    def end(self, patience: float = _SECONDS_TO_LEAVE) -> None:
        """Wait this many seconds until it has left, then kill it and its children."""
        self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_SECONDS_TO_LEAVE)
        os.close(self._stdin)
        self.connection.close()
        self._stacks.close()


_SECONDS_TO_ANSWER_TOO = 3.0  # for the other ranks, once one has failed
_SECONDS_BETWEEN_LOOKS = 0.5  # at the processes that have not answered


class WorkerGroup:
    """One process per rank. The ranks of a replica are a tensor-parallel group, equal parts of replicas a data-parallel
    one.

    Not safe for several threads at once; `TensorParallelModel` takes care of that.

    Args:
        size: number of ranks.
        replicas: number of replicas of the model that the ranks are divided into.
        expert_parallel_size: ranks that split its experts.

    Attributes:
        memory: descriptor of the memory that all of them and this process share.
    """

    def __init__(self, size: int, replicas: int, expert_parallel_size: int) -> None:
        self.size = size
        self.memory = new_shared_file()
        # An unnamed file: anyone who can write to the store can impersonate a rank, and other users can reach every
        # port.
        self._store = new_shared_file()
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._is_open = True
        try:
            for rank in range(size):
                worker = WorkerProcess(
                    rank, replicas, expert_parallel_size, self.memory, self._store, self._environment(rank)
                )
                self._workers.append(worker)
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except BaseException:
            self._shut(patience=0.0)
            raise

    @property
    def is_open(self) -> bool:
        """Whether the processes are there to be asked."""
        return self._is_open

    @property
    def can_answer(self) -> bool:
        """Whether no process has ended or is stopped."""
        return all(worker.can_answer for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [worker.pid for worker in self._workers]

    def call(self, program: int) -> None:
        """Run a program on every rank, on what is in the shared memory.

        Raises:
            WorkerError: a rank raised, died or was stopped.
        """
        self._exchange(range(self.size), lambda rank, to: send_header(to, CALL, program), "a call")

    def ask_all(self, request: Any, what: str) -> list[Any]:
        """Send one request to every rank; their answers by rank. `what` says what it is, for errors."""
        answers = self.ask(dict.fromkeys(range(self.size), request), what)
        return [answers[rank] for rank in range(self.size)]

    def ask(self, requests: Mapping[int, Any], what: str) -> dict[int, Any]:
        """Send requests to some ranks; their answers by rank.

        Raises:
            WorkerError: a rank raised, died or was stopped.
            OSError: what a rank writes to is full or read-only.
        """
        return self._exchange(list(requests), lambda rank, to: send_object(to, requests[rank]), what)

    def close(self) -> None:
        """End the processes; those that are idle leave by themselves."""
        self._shut(patience=2.0)

    def _shut(self, patience: float) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._selector.close()
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.end(patience)
        os.close(self.memory)
        os.close(self._store)

    def _exchange(self, ranks: Sequence[int], send: Callable[[int, socket.socket], None], what: str) -> dict[int, Any]:
        """Send each of these ranks a message, and collect their answers.

        Any interruption ends the group, since the progress of the ranks is unknown then.
        """
        try:
            with contextlib.suppress(OSError):  # the end of a process shows when its answer is awaited
                for rank in ranks:
                    send(rank, self._workers[rank].connection)
            answers, errors, dead = self._collect(set(ranks))
        except BaseException:
            self._shut(patience=0.0)
            raise
        if not errors:
            return answers
        silent = set(ranks) - answers.keys() - errors.keys()
        if dead or silent:
            self._shut(patience=0.0)
        raise WorkerError(_describe_errors(errors, silent, self.size, what))

    def _collect(self, ranks: set[int]) -> tuple[dict[int, Any], dict[int, str], bool]:
        """One answer of each of these ranks: values, errors, and whether one has died or is stopped.

        Once a rank has failed the others get a moment to answer as well. If they do, the group continues: an input that
        every rank refuses ends nothing. If a rank has died, or one waits in a collective for another that raised, all
        are ended. So they are if one is found stopped twice in a row, since it might never continue.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        dead = False
        deadline: float | None = None
        stopped: set[int] = set()
        while silent := ranks - answers.keys() - errors.keys():
            timeout = _SECONDS_BETWEEN_LOOKS if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._selector.select(timeout)
            if not ready and deadline is not None:
                break
            if not ready:
                stopped_before, stopped = stopped, {rank for rank in silent if self._workers[rank].is_stopped}
                if lasting := stopped_before & stopped:
                    return answers, {rank: self._workers[rank].describe_stop() for rank in lasting}, True
            for key, _ in ready:
                worker: WorkerProcess = key.data
                answer = self._answer_of(worker)
                if answer is None:
                    self._selector.unregister(worker.connection)
                    dead = True
                    errors[worker.rank] = f"the worker {worker.describe_end()}"
                elif answer.lacks_main_guard:
                    raise MissingMainGuardError(answer.error)
                elif answer.storage_error is not None:
                    raise answer.storage_error
                elif answer.error:
                    errors[worker.rank] = f"{answer.error}\n{answer.traceback}"
                else:
                    answers[worker.rank] = answer.value
            if errors and deadline is None:
                deadline = time.monotonic() + _SECONDS_TO_ANSWER_TOO
        return answers, errors, dead

    @staticmethod
    def _answer_of(worker: WorkerProcess) -> Answer | None:
        """None if the process is gone."""
        try:
            kind, _, answer = receive(worker.connection)
        except (EOFError, OSError):
            return None
        return Answer() if kind == DONE else answer

    def _environment(self, rank: int) -> dict[str, str]:
        """The rank as torchrun would set it, and a fair share of the cores."""
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
    """Ranks that failed alike are named once: the deaths and waits that followed are less telling than the cause."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        by_text.setdefault(text, []).append(rank)
    parts = [f"rank {', '.join(map(str, ranks))} of {size} in {what}: {text}" for text, ranks in by_text.items()]
    if silent:
        parts.append(f"rank {', '.join(map(str, sorted(silent)))} was still waiting for the others and was ended")
    return "\n".join(parts)
