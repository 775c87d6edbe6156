"""Launches ranks: on this machine by this module, by torchrun, or as tasks of a Slurm step.

Under torchrun or Slurm nothing is started: the process already is a rank. Slurm (`srun --ntasks-per-node=8 nxd train
...`) identifies a task by its own variables; they are translated to torchrun's, which torch.distributed reads.
"""

import ctypes
import math
import os
import queue
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from nxd_state import StoreServer

EXIT_STOPPED = 143  # 128 + SIGTERM
LAUNCHER_PID = "NXD_LAUNCHER_PID"  # set in the ranks that are started here
PEERS_SECRET = "NXD_PEERS_SECRET"  # same as in nxd_elastic.peers.server, which imports torch and so takes seconds

_LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # of prctl(2)
SECONDS_TO_END = 20.0  # for the other ranks once one has failed: they learn of it at once, and report what they did
SECONDS_TO_STOP = 60.0  # for the other ranks once a signal has killed one that had no handler yet
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def is_launched() -> bool:
    """Whether this process is a rank started by torchrun or another launcher that sets RANK."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_ranks(nproc: int, command: Sequence[str]) -> int:
    """Run a command on `nproc` ranks of this machine and wait for them.

    The ranks meet through a key-value store that this process serves on the loopback interface, only to processes of
    this user. SIGTERM and Ctrl-C are forwarded to them. When a rank fails, the others have a few seconds to exit and
    are then killed.

    Returns:
        The exit code: 0, 143 after a signal, a rank's own exit code if it is more than 1, else 1.

    Raises:
        OSError: a process could not be started.
    """
    with socket.create_server((_LOOPBACK, 0), backlog=2 * nproc) as listener, _RankProcesses() as ranks:
        environment = _environment(nproc, listener.getsockname()[1])
        for rank in range(nproc):
            ranks.start(
                command,
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)},
            )
        # Imported now: it takes seconds, while the ranks import the same. Their connections wait until then.
        from nxd_state import StoreServer  # noqa: PLC0415

        with StoreServer(listener) as store:
            return _wait(ranks, store)


def _environment(nproc: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set, except those that differ between ranks."""
    own = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served here, not by rank 0
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"nxd-{os.getpid()}",
        LAUNCHER_PID: str(os.getpid()),
    }
    overridable = {
        "OMP_NUM_THREADS": str(threads_per_rank(nproc)),
        PEERS_SECRET: secrets.token_hex(),  # other users of this machine could read it from the store
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "PYTHONHASHSEED": "0",  # some models call modules in the order of a set, which must not differ between ranks
    }
    return overridable | dict(os.environ) | own


def threads_per_rank(nproc: int) -> int:
    """How many threads each of `nproc` ranks on this machine should compute with; at least 1.

    The cores that this process may use, minus those that other programs keep busy, divided among the ranks: a thread
    that waits for a core holds up all other threads of its rank, which costs many times what the core would gain.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = cores - round(os.getloadavg()[0])
    return max(1, int(min(free, _cores_of_container())) // nproc)


def _cores_of_container() -> float:
    """The number of cores that the container may use (cgroup v2), such as 1.5; infinity without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # no such file; or "max"
        return math.inf


@contextmanager
def own_threads() -> Iterator[None]:
    """Inside, torch computes with `threads_per_rank` threads, unless OMP_NUM_THREADS is set."""
    import torch  # noqa: PLC0415 - takes seconds, and the launcher does not need it

    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _RankProcesses:
    """The processes of the ranks, in rank order. A context manager: processes still running at its exit are killed.

    Signals that arrive inside are forwarded; the third one kills.

    Attributes:
        ended: the ranks whose processes have ended, in that order.
        signals: the signals received so far.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.signals: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _FORWARDED:
            self._previous[number] = signal.signal(number, self._forward)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the next rank in its own session; otherwise it would also get the terminal's Ctrl-C."""
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        rank = len(self.processes)
        self.processes.append(process)
        threading.Thread(target=self._await_end, args=(rank,), daemon=True).start()

    def kill(self) -> list[int]:
        """Kill the ranks that still run, with the processes they have started; returns these ranks."""
        running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for rank in running:
            with suppress(ProcessLookupError):
                os.killpg(self.processes[rank].pid, signal.SIGKILL)
        for rank in running:
            self.processes[rank].wait()
        return running

    def _await_end(self, rank: int) -> None:
        self.processes[rank].wait()
        self.ended.put(rank)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        handed_on = number if number == signal.SIGINT else signal.SIGTERM
        for process in self.processes:
            process.send_signal(handed_on if len(self.signals) <= 2 else signal.SIGKILL)


def _wait(ranks: _RankProcesses, store: "StoreServer") -> int:
    """Wait for all ranks and report which one failed first; returns the exit code."""
    from nxd_state import EXIT_PEER_FAILED, FAILURE_SHOWN  # noqa: PLC0415 - it loads torch

    codes: dict[int, int] = {}
    first: int | None = None  # the rank that failed by itself
    give_up: float | None = None
    failed = False
    while len(codes) < len(ranks.processes):
        try:
            rank = ranks.ended.get(timeout=None if give_up is None else max(0.0, give_up - time.monotonic()))
        except queue.Empty:
            killed = ranks.kill()
            names = ", ".join(f"rank {rank}" for rank in killed)
            when = f"{SECONDS_TO_END:g} s after the failure" if failed else f"{SECONDS_TO_STOP:g} s after the signal"
            print(f"nxd: {names} did not end {when} and was killed", file=sys.stderr)
            codes |= dict.fromkeys(killed, EXIT_PEER_FAILED)
            break
        code = codes[rank] = ranks.processes[rank].returncode
        if code == 0 or (ranks.signals and code == EXIT_STOPPED):
            continue
        if ranks.signals and -code in (*ranks.signals, signal.SIGTERM):
            # This rank had no handler yet. Ranks that had one, or ran code that swallows Ctrl-C, wait for it.
            give_up = give_up or time.monotonic() + SECONDS_TO_STOP
            continue
        if not failed:
            give_up, failed = min(give_up or math.inf, time.monotonic() + SECONDS_TO_END), True
        if first is None and code != EXIT_PEER_FAILED:
            first = rank
            if code < 0:
                print(f"nxd: rank {rank} was killed by {_signal_name(-code)}", file=sys.stderr, flush=True)
                for prefix in ("", "/worker/attempt_0/"):  # torch 2.9's ranks see the store through a prefix
                    store.set(f"{prefix}{FAILURE_SHOWN}", str(rank))
    return _exit_code(codes, first, ranks.signals)


def _exit_code(codes: Mapping[int, int], first: int | None, signals: Sequence[int]) -> int:
    if first is not None and codes[first] > 1:  # the rank has reported the error
        return codes[first]
    if first is not None:
        if codes[first] == 1:
            print(f"nxd: rank {first} failed first; the other ranks have ended", file=sys.stderr)
        return 1
    if signals and any(codes.values()):
        print(f"nxd: stopped by {_signal_name(signals[0])}; all ranks have ended", file=sys.stderr)
        return EXIT_STOPPED
    return int(any(codes.values()))


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:  # a real-time signal
        return f"signal {number}"


def end_with_launcher() -> None:
    """On Linux, have this rank killed as soon as the process that started it ends, for whatever reason.

    Otherwise the ranks of a killed launcher would keep training unnoticed and keep the run's folder locked. A
    checkpoint that is being written is discarded; the one before it stays intact.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if LAUNCHER_PID in os.environ:
        try:
            os.kill(int(os.environ[LAUNCHER_PID]), 0)
        except ProcessLookupError:  # it ended before the call above
            os._exit(EXIT_STOPPED)


_TORCHRUN_FOLDER = "torchelastic_"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # in .../torchelastic_*/<run>/attempt_0/<rank>/, for torch's `record`
_SECONDS_OF_A_START = 600.0  # torchrun makes its folder before the first rank runs


def remove_torchrun_folders() -> None:
    """Remove the log folder that torchrun creates for its ranks and never removes, unless it holds a file.

    Folders left by earlier torchruns are removed too: this user's empty ones that no process refers to.
    """
    error_file = os.environ.pop(_ERROR_FILE, "")
    if error_file:
        folder = Path(error_file).parent
        for level in (folder, *folder.parents):
            if not any(it.name.startswith(_TORCHRUN_FOLDER) for it in (level, *level.parents)):
                break
            with suppress(OSError):  # other ranks share it; the last one removes it
                level.rmdir()
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{_TORCHRUN_FOLDER}*"):
            if _is_left_over(folder):
                for path, _, _ in os.walk(folder, topdown=False):
                    os.rmdir(path)


def _is_left_over(folder: Path) -> bool:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or not Path("/proc/self/environ").exists():
        return False
    paths = [folder, *folder.rglob("*")]
    newest = max(path.lstat().st_mtime for path in paths)
    if not all(path.is_dir() for path in paths) or time.time() - newest < _SECONDS_OF_A_START:
        return False
    return not any(os.fsencode(f"{_ERROR_FILE}={folder}/") in environment for environment in _environments())


def _environments() -> Iterator[bytes]:
    """The environments of all processes that this user may read, as they were at their start."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            yield file.read_bytes()


FIRST_PORT, NUM_PORTS = 20000, 10000
_OF_A_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, for a task of a Slurm step with several tasks; else an empty dict.

    Variables that are already set are omitted, so that a job script can override any of them.
    """
    remedy = "start it with srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not num_tasks.isdecimal():
        raise ValueError(f"SLURM_STEP_NUM_TASKS={num_tasks!r} is not a number of tasks; {remedy}")
    if "RANK" in environ or int(num_tasks) < 2:
        return {}
    missing = [name for name in _OF_A_TASK if name not in environ]
    if missing:
        raise ValueError(f"SLURM_STEP_NUM_TASKS={num_tasks} without {', '.join(missing)}; {remedy}")
    told = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        # All tasks of a job get the same port; jobs that share a node get different ones.
        "MASTER_PORT": str(FIRST_PORT + int(environ["SLURM_JOB_ID"]) % NUM_PORTS),
    }
    return {name: value for name, value in told.items() if name not in environ}


def advice_on_ranks(nproc: int, environ: Mapping[str, str]) -> str:
    """How to start this many ranks, for messages: with srun inside a Slurm job that has several tasks."""
    num_tasks = _tasks_without_srun(environ)
    if num_tasks is None:
        return f"use --nproc {nproc}"
    return (
        f"start it with srun, whose tasks are the ranks (SLURM_NTASKS={num_tasks}, but SLURM_STEP_NUM_TASKS is not "
        f"set, so srun did not start this process), or use --nproc {nproc} on one host"
    )


def one_of_several_tasks(environ: Mapping[str, str]) -> str | None:
    """A remark for a process that is a single rank in a Slurm job of several tasks; None elsewhere."""
    num_tasks = _tasks_without_srun(environ)
    if num_tasks is None:
        return None
    return f"this is a single rank, and the job has SLURM_NTASKS={num_tasks} tasks: start it with srun to use them all"


def _tasks_without_srun(environ: Mapping[str, str]) -> str | None:
    """The tasks of a Slurm job that has several, for a process that srun did not start; None elsewhere."""
    num_tasks = environ.get("SLURM_NTASKS", "1")
    return None if num_tasks == "1" or "SLURM_STEP_NUM_TASKS" in environ else num_tasks


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `trn[07-12,15],login` gives `trn07`."""
    found = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?", nodelist)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodelist!r} is not a node list; set MASTER_ADDR to the first host")
    return "".join(part or "" for part in found.groups())
