"""The supervisor of a rank: the process that the launcher has started forks the trainer, and another one if it dies.

The launcher sees the supervisor, so it hears of nothing but the end of the run. A fork has loaded all modules: a death
costs no start of an interpreter. The supervisor computes nothing, so there are no threads or devices that a fork would
break.

- A trainer that a signal ends (SIGKILL, out of memory, a crash) is replaced.
- One that says nothing for some seconds (stopped, or stuck in one call) is killed, and so replaced.
- One that ends by itself ends the supervisor with its exit code, also by an exception: a bug must not loop here.
- The memory server of the host is replaced, too.
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

from nxd_elastic.memory import HostMemory

TRAINER_NAME, SUPERVISOR_NAME = "nxd-trainer", "nxd-supervisor"  # as `ps` shows them
_PR_SET_NAME = 15  # of prctl(2)
DEATHS_WITHOUT_A_STEP = 10  # in a row, of one rank; then the run cannot go on
ALIVE, STEP_TAKEN, ENDING = b".", b"+", b"-"  # what a trainer says

_LOOK_SECONDS = 0.25
_SECONDS_TO_START = 60.0  # until a trainer's first word
_SECONDS_TO_END = 60.0  # after its last one; a loaded machine takes many to take an interpreter down
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


class SupervisorPipe:
    """A trainer's side: what it tells its supervisor, and what it was told when it was forked.

    Attributes:
        supervisor: the process that has forked this one.
        launcher: the process that has started the supervisor: torchrun's agent, or `nxd train --nproc`.
        stopping: whether the run had been asked to stop before this process began.
        replaces: whether another trainer of this supervisor has died before.
        server: `host:port` of the memory server that the supervisor has started; "" if it has started none.
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
        self._memory = memory  # the supervisor's; letting go of it would look like an end
        self._descriptor = descriptor

    def say(self, word: bytes) -> None:
        """Say `ALIVE`, `STEP_TAKEN` or, at last, `ENDING`."""
        with contextlib.suppress(OSError):  # the supervisor has ended, and so will this process
            os.write(self._descriptor, word)


def supervise(*, silence: float, keeps_memory: bool = False) -> SupervisorPipe | int:
    """Fork trainers until one of them ends by itself.

    Call it in the main thread, with everything imported that the trainer needs, and before anything is computed.

    Args:
        silence: seconds without a word after which a trainer is killed, or the memory server.
        keeps_memory: start the memory server of this host, for checkpoints in memory.

    Returns:
        In a trainer its supervisor pipe; in the supervisor, at the end, the exit code for it.

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
    importlib.import_module("torch._dynamo")  # seconds that the first optimizer of each trainer would take otherwise
    memory = HostMemory(silence) if keeps_memory else None
    supervisor = _Supervisor(silence, memory)
    try:
        outcome = supervisor.run()
    finally:
        supervisor.leave()
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

    def leave(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self) -> SupervisorPipe | int:
        if self._most_restarts() == 0:
            self._say("will not be replaced if it is lost, because torchrun's --max-restarts is 0; set it to 100, say")
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
                return self._be_trainer(writing)
            os.close(writing)
            status = self._watch(pid, reading)
            os.close(reading)
            code = os.waitstatus_to_exitcode(status)
            if code >= 0:
                return code
            if (exit_code := self._may_not_go_on(-code)) is not None:
                return exit_code
            self._restarts += 1

    def _be_trainer(self, writing: int) -> SupervisorPipe:
        os.setpgid(0, 0)  # a launcher signals the supervisor's process group, and the supervisor this process
        die_with_parent(self._process.pid)
        _name_this_process(TRAINER_NAME)
        stopping, replaces = bool(self._signals), self._restarts > 0
        return SupervisorPipe(
            writing, self._process, self._launcher, self._memory, stopping=stopping, replaces=replaces
        )

    def _watch(self, pid: int, reading: int) -> int:
        """Listen to a trainer until it ends; returns its wait status."""
        heard, silence, open_end = time.monotonic(), max(self._silence, _SECONDS_TO_START), [reading]
        while True:
            if self._memory is not None:
                self._memory.revive()
            if select.select(open_end, [], [], _LOOK_SECONDS)[0]:
                words = os.read(reading, 4096)
                open_end = open_end if words else []  # closed: it ends
                if words:
                    heard, silence = time.monotonic(), self._silence
                if STEP_TAKEN in words:
                    self._deaths_without_a_step = 0
                if ENDING in words:
                    silence = max(self._silence, _SECONDS_TO_END)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._trainer = None
                return status
            if time.monotonic() - heard > silence:
                self._say(f"has been silent for {silence:g} s and was killed")
                os.kill(pid, signal.SIGKILL)
                heard = time.monotonic()

    def _may_not_go_on(self, number: int) -> int | None:
        """After a death by a signal: the supervisor's exit code, if there shall be no other trainer."""
        if number in self._signals or len(self._signals) > 1:  # it was told to end; the second one does so at once
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
        """As told to torchrun. Our own launcher has no such limit, and sets 0."""
        told = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        return None if told is None or LAUNCHER_PID in os.environ else int(told)

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
