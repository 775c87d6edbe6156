"""The supervisor of a rank: the process that the launcher starts forks the trainer, and another one if it dies.

The launcher sees only the supervisor, and so only the end of the run. A fork has all modules loaded, so a replacement
starts fast. The supervisor computes nothing, so it has no threads or devices that a fork would break.

- A trainer that is killed by a signal (SIGKILL, out of memory, a crash) is replaced.
- A trainer that is silent for some seconds (stopped, or stuck in a call) is killed and replaced.
- A trainer that exits, also with an exception, ends the supervisor with its exit code: a bug must not loop here.
- A memory server that dies is restarted, too.
"""

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
import threading
import time
from types import FrameType

from nxd_cli.launch import EXIT_STOPPED, LAUNCHER_PID
from nxd_state.processes import Process, die_with_parent, hold_standard_streams

from nxd_elastic.peers.starting import HostMemory

TRAINER_NAME, SUPERVISOR_NAME = "nxd-trainer", "nxd-supervisor"  # as `ps` shows them
_PR_SET_NAME = 15  # of prctl(2)
DEATHS_WITHOUT_A_STEP = 10  # in a row, of one rank; then the run ends
ALIVE, STEP_TAKEN, ENDING = b".", b"+", b"-"  # messages of a trainer

_POLL_SECONDS = 0.25
_SECONDS_TO_START = 60.0  # until a trainer's first message
_SECONDS_TO_END = 60.0  # after its last one: an interpreter may take long to exit on a loaded machine
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


class SupervisorPipe:
    """A trainer's end of the pipe to its supervisor, with the state at the fork.

    Attributes:
        supervisor: the process that forked this one.
        launcher: the process that started the supervisor: torchrun's agent, or `nxd train --nproc`.
        stopping: whether the run had been asked to stop before this process started.
        replaces: whether another trainer of this supervisor died before.
        server: `host:port` of the memory server that the supervisor started; "" if there is none.
    """

    def __init__(
        self,
        descriptor: int,
        supervisor: Process,
        launcher: Process,
        memory: HostMemory | None,
        *,
        stopping: bool,
        replaces: bool,
    ) -> None:
        self.supervisor, self.launcher, self.stopping, self.replaces = supervisor, launcher, stopping, replaces
        self.server = memory.address if memory is not None else ""
        self._memory = memory  # the supervisor's object, which would close its pipes when it is freed
        self._descriptor = descriptor

    def send(self, message: bytes) -> None:
        """Send `ALIVE`, `STEP_TAKEN` or, at the end, `ENDING`."""
        with contextlib.suppress(OSError):  # the supervisor has ended, and so will this process
            os.write(self._descriptor, message)


def supervise(*, silence: float, keeps_memory: bool = False) -> SupervisorPipe | int:
    """Fork trainers until one of them exits.

    Call it in the main thread, after importing everything that the trainer needs, and before anything is computed.

    Args:
        silence: seconds without a message after which a trainer or the memory server is killed.
        keeps_memory: whether to start the memory server of this host, for checkpoints in memory.

    Returns:
        In a trainer, its supervisor pipe; in the supervisor, when the run has ended, its exit code.

    Raises:
        RuntimeError: this system has no /proc, or this process has threads.
        OSError: the memory server does not start.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            "elastic training needs process supervision, which only Linux has; run it there, or without --elastic"
        )
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        raise RuntimeError(f"elastic training forks this process, which has threads ({names}); start it before them")
    _name_this_process(SUPERVISOR_NAME)
    importlib.import_module("torch._dynamo")  # otherwise each trainer's first optimizer would take seconds to load it
    memory = HostMemory(silence) if keeps_memory else None
    supervisor = _Supervisor(silence, memory)
    try:
        outcome = supervisor.run()
    finally:
        supervisor.restore_signals()
    if memory is not None and isinstance(outcome, int):
        may_come_again = outcome not in (0, EXIT_STOPPED) and LAUNCHER_PID not in os.environ
        memory.close(forget=not may_come_again)
    return outcome


class _Supervisor:
    def __init__(self, silence: float, memory: HostMemory | None) -> None:
        self._silence, self._memory = silence, memory
        self._process, self._launcher = Process.of(os.getpid()), Process.of(os.getppid())
        self._signals: list[int] = []
        self._trainer: int | None = None
        self._restarts = self._deaths_without_a_step = 0
        self._previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}

    def restore_signals(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self) -> SupervisorPipe | int:
        if self._most_restarts() == 0:
            self._say(
                "will not be replaced if it is lost, because torchrun's --max-restarts is 0; "
                "set it to a value such as 100"
            )
        while True:
            hold_standard_streams()
            reading, writing = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            with _blocked():
                pid = os.fork()
                self._trainer = pid or None
            if pid == 0:
                os.close(reading)
                return self._start_trainer(writing)
            os.close(writing)
            status = self._watch(pid, reading)
            os.close(reading)
            code = os.waitstatus_to_exitcode(status)
            if code >= 0:
                return code
            if (exit_code := self._exit_code_after(-code)) is not None:
                return exit_code
            self._restarts += 1

    def _start_trainer(self, writing: int) -> SupervisorPipe:
        os.setpgid(0, 0)  # a launcher signals the supervisor's process group, and the supervisor this process
        die_with_parent(self._process.pid)
        _name_this_process(TRAINER_NAME)
        stopping, replaces = bool(self._signals), self._restarts > 0
        return SupervisorPipe(
            writing, self._process, self._launcher, self._memory, stopping=stopping, replaces=replaces
        )

    def _watch(self, pid: int, reading: int) -> int:
        """Read a trainer's messages until it ends; returns its wait status."""
        heard, silence, open_end = time.monotonic(), max(self._silence, _SECONDS_TO_START), [reading]
        while True:
            if self._memory is not None:
                self._memory.restart_if_dead()
            if select.select(open_end, [], [], _POLL_SECONDS)[0]:
                messages = os.read(reading, 4096)
                open_end = open_end if messages else []  # closed: the trainer is exiting
                if messages:
                    heard, silence = time.monotonic(), self._silence
                if STEP_TAKEN in messages:
                    self._deaths_without_a_step = 0
                if ENDING in messages:
                    silence = max(self._silence, _SECONDS_TO_END)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._trainer = None
                return status
            if time.monotonic() - heard > silence:
                self._say(f"has been silent for {silence:g} s and was killed")
                os.kill(pid, signal.SIGKILL)
                heard = time.monotonic()

    def _exit_code_after(self, number: int) -> int | None:
        """Return the supervisor's exit code after a trainer's death by a signal; None to replace the trainer."""
        if number in self._signals or len(self._signals) > 1:  # it was asked to end; a second signal ends it at once
            return EXIT_STOPPED
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        self._deaths_without_a_step += 1
        most = self._most_restarts()
        if most is not None and self._restarts >= most:
            self._say(f"was killed by {name} after {self._restarts} restarts; see torchrun's --max-restarts")
            return 1
        if self._deaths_without_a_step >= DEATHS_WITHOUT_A_STEP:
            self._say(f"was killed by {name}, {DEATHS_WITHOUT_A_STEP} times in a row without taking a step")
            return 1
        self._say(f"was killed by {name}; another process replaces it")
        return None

    def _most_restarts(self) -> int | None:
        """Return torchrun's `--max-restarts`; our own launcher has no limit, but sets the variable to 0."""
        limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        return None if limit is None or LAUNCHER_PID in os.environ else int(limit)

    def _say(self, text: str) -> None:
        print(f"nxd elastic: the trainer of rank {os.environ.get('RANK', '0')} {text}", file=sys.stderr, flush=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._trainer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._trainer, number)


@contextlib.contextmanager
def _blocked():  # type: ignore[no-untyped-def]
    """Block signals; a signal that arrives meanwhile is handled afterwards, by the supervisor or the trainer."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def _name_this_process(name: str) -> None:
    """Set the name that `ps` and /proc/PID/comm show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
