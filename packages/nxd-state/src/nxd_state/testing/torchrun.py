"""Runs a command line under torchrun as a subprocess, for tests of programs that start as their users start them.

Functions of a test are quicker on the warm pool of `nxd_state.testing.pool`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

_SECONDS_TO_WRITE_STACKS = 2.0


class TorchrunResult(NamedTuple):
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_torchrun(
    args: Sequence[str],
    nproc: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> TorchrunResult:
    """Runs `torchrun --standalone --nproc-per-node nproc <args>` and waits for it.

    Args:
        args: the script or `-m module`, and its arguments.
        nproc: the number of ranks.
        env: variables on top of this process's environment.
        timeout: seconds until torchrun and its ranks are killed.

    Raises:
        TimeoutError: the command took too long; the message shows what it printed and each rank's Python stacks.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        *args,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(env or {})}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill_tree(process)
            raise TimeoutError(
                f"{' '.join(command)} did not end within timeout={timeout} s and was killed\n"
                f"----- stdout -----\n{_text(stdout)}\n----- stderr -----\n{_text(stderr)}"
            ) from None
        except BaseException:
            _kill_tree(process)
            raise
        return TorchrunResult(process.returncode, _text(stdout), _text(stderr))


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all its descendants; torchrun gives each rank a session of its own."""
    descendants = _descendants(process.pid)
    _signal(descendants, signal.SIGABRT)  # on which faulthandler writes the stacks
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_WRITE_STACKS)
    _signal([process.pid, *descendants], signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for ancestor in found:
        found += children.get(ancestor, [])
    return found[1:]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
