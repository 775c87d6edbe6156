"""Runs a program under torchrun as a subprocess, the way users start it. For functions, the warm pool is faster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from nxd_testing.failure import deadline

_SECONDS_TO_WRITE_STACKS = 2.0


class TorchrunResult(NamedTuple):
    """Exit code and output of a command."""

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
    """Run `torchrun --standalone --nproc-per-node nproc <args>` and wait for it.

    Args:
        args: the script or `-m module`, and its arguments.
        nproc: number of ranks.
        env: environment variables in addition to this process's own.
        timeout: seconds until torchrun and its ranks are killed; scaled by `deadline`.

    Raises:
        TimeoutError: the command took too long; the message shows its output and each rank's Python stacks.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(env or {})}
    with (
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as logs,  # torchrun does not remove its own
    ):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(nproc),
            "--log-dir",
            logs,
            *args,
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(deadline(timeout))
        except subprocess.TimeoutExpired:
            _kill_tree(process)
            raise TimeoutError(
                f"{' '.join(command)} did not end within timeout={deadline(timeout):.1f} s and was killed\n"
                f"----- stdout -----\n{_text(stdout)}\n----- stderr -----\n{_text(stderr)}"
            ) from None
        except BaseException:
            _kill_tree(process)
            raise
        return TorchrunResult(process.returncode, _text(stdout), _text(stderr))


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants; torchrun starts each rank in its own session."""
    os.kill(process.pid, signal.SIGSTOP)  # keeps torchrun from ending the other ranks when the first one dies
    descendants = _descendants(process.pid)
    for pid in descendants:
        _signal(pid, signal.SIGABRT)  # faulthandler writes the stacks; one at a time, so that they do not interleave
        _wait_until_dead(pid)
    for pid in [process.pid, *descendants]:
        _signal(pid, signal.SIGKILL)
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


def _wait_until_dead(pid: int) -> None:
    end = time.monotonic() + deadline(_SECONDS_TO_WRITE_STACKS)
    while time.monotonic() < end:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        if state.stdout.strip()[:1] in ("", "Z"):  # gone, or a zombie that torchrun has not reaped
            return
        time.sleep(0.01)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
