"""Starts and restarts the memory server of a host, from the supervisor of the host's first rank.

A memory server outlives the trainers of its host. One that dies is restarted at the same address, and one that hangs
is killed first. Its folder is named for the launcher's agent, so supervisors that the agent restarts find its contents;
the next run of this user removes the folders of agents that have ended.
"""

import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Self

import torch.distributed as dist
from nxd_state.processes import Process, hold_standard_streams

from nxd_elastic.peers import server
from nxd_elastic.peers.server import SECRET
from nxd_elastic.peers.store import OWN_SERVER, SERVERS

_SECONDS_TO_START = 30.0
_MAX_PAUSE = 60.0  # seconds between two restarts of a memory server that keeps dying
_MEMORY = Path("/dev/shm")
_PREFIX = "nxd-memory"
_SECRET_KEY = "nxd_elastic/secret"


class MemoryServerProcess:
    """A process that keeps files in the memory of this host, and ends when this process ends. A context manager.

    The files stay in its folder, for the next memory server of that folder.

    Args:
        folder: a folder in memory, such as one below `/dev/shm`; created if missing.
        secret: the job's secret; the same on all its hosts, and `NXD_PEERS_SECRET` of its ranks.
        host: the address by which other hosts reach this one.

    Attributes:
        address: `host:port` for `peers_url`, with an IPv6 host in brackets; the same after `restart`.

    Raises:
        OSError: the process did not start.
    """

    def __init__(self, folder: "str | os.PathLike[str]", secret: str, host: str = "127.0.0.1") -> None:
        self._folder, self._host = Path(folder), host
        self._environment: Mapping[str, str] = {**os.environ, SECRET: secret}
        hold_standard_streams()
        self._port = _reserved_port(host)
        self._asked: float | None = None  # time of the request that has no answer yet, on the monotonic clock
        try:
            self._process, self.address = self._start()
        except OSError:
            self._port.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def death(self) -> str | None:
        """Return how the process ended, such as "was killed by SIGKILL"; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if -code in signal.valid_signals():
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def silence(self) -> float:
        """Return for how many seconds it has not answered; each call sends a request without waiting for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._asked is not None and _is_readable(self._process.stdout.fileno(), 0.0):
            os.read(self._process.stdout.fileno(), 1)
            self._asked = None
        if self._asked is not None:
            return time.monotonic() - self._asked
        with suppress(OSError):  # it has died, see `death`
            os.write(self._process.stdin.fileno(), b"?")
        self._asked = time.monotonic()
        return 0.0

    def kill(self) -> None:
        """Kill it, even if it is stopped."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """After its death, serve the same folder at the same address again.

        Raises:
            OSError: it did not start; it may be tried again.
        """
        self._close_pipes()
        self._asked = None
        self._process, self.address = self._start()

    def close(self) -> None:
        """End it."""
        self.kill()  # closing its input does not suffice: a fork of this process may hold the other end too
        self._close_pipes()
        self._port.close()

    def _start(self) -> "tuple[subprocess.Popen[bytes], str]":
        port = self._port.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", server.__file__, str(self._folder), self._host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for the ranks
        )
        assert process.stdout is not None
        if not _is_readable(process.stdout.fileno(), _SECONDS_TO_START):
            process.kill()
        address = process.stdout.readline().decode().strip()
        if not address:
            code = process.wait()
            raise OSError(f"the memory server of {self._folder} exited with code {code}; see its output")
        return process, address

    def _close_pipes(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_readable(descriptor: int, seconds: float) -> bool:
    """Wait up to this long for data or the end of a stream."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _reserved_port(host: str) -> socket.socket:
    """Reserve a free port until this socket is closed; it does not listen, so clients notice a dead server."""
    reserved = socket.socket(server.family_of(host))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, 0))
    except OSError:
        reserved.close()
        raise
    return reserved


class HostMemory:
    """A supervisor's memory server; only the supervisor of a host's first rank has one.

    Attributes:
        address: `host:port` of the memory server; "" if there is none.

    Raises:
        OSError: there is no memory to keep files in, or the memory server does not start.
        torch.distributed.DistError: the job's store cannot be reached.
    """

    def __init__(self, silence: float) -> None:
        self.address = ""
        self._silence = silence
        self._next_start, self._pause = 0.0, 1.0
        self._server: MemoryServerProcess | None = None
        if SECRET not in os.environ:  # our own launcher sets it; the ranks of several hosts share only the store
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
            os.environ[SECRET] = store.compare_set(_SECRET_KEY, "", secrets.token_hex()).decode()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        launcher = Process.of(os.getppid())
        _remove_folders_of_ended_launchers(launcher)
        self._folder = _MEMORY / f"{_prefix(launcher)}-{launcher.pid}-{launcher.start}"
        self._server = MemoryServerProcess(self._folder, os.environ[SECRET], _own_address())
        self.address = self._server.address

    def restart_if_dead(self) -> None:
        """Restart the memory server, with its contents, if it has died or does not answer."""
        if self._server is None:
            return
        death, now = self._server.death(), time.monotonic()
        if death is None and self._server.silence() > self._silence:
            self._server.kill()
            death = f"has not answered for {self._silence:g} s and was killed"
        if death is None or now < self._next_start:
            return
        self._pause = 1.0 if now - self._next_start > _MAX_PAUSE else min(2 * self._pause, _MAX_PAUSE)
        self._next_start = now + self._pause
        try:
            self._server.restart()
            outcome = "it was restarted with its contents"
        except OSError as error:
            outcome = f"it could not be restarted: {error}; the next attempt is in {self._pause:g} s"
        print(f"nxd elastic: the memory server of this host {death}; {outcome}", file=sys.stderr, flush=True)

    def close(self, *, forget: bool) -> None:
        """End the memory server; `forget` also removes its files, when the run has ended."""
        if self._server is not None:
            self._server.close()
            if forget:
                shutil.rmtree(self._folder, ignore_errors=True)


def use_memory_servers(servers: Sequence[str], own: str) -> None:
    """Set this process's memory servers: those of all hosts, in the same order on all ranks, and its own host's."""
    os.environ |= {SERVERS: ",".join(servers), OWN_SERVER: own}


def _prefix(process: Process) -> str:
    """Include the namespace of the process id: containers may share this memory, but not their process ids."""
    namespace = "".join(filter(str.isdecimal, process.host.rpartition("/")[2]))
    return f"{_PREFIX}-{os.getuid()}-{namespace}"


def _remove_folders_of_ended_launchers(observer: Process) -> None:
    for folder in _MEMORY.glob(f"{_prefix(observer)}-*"):
        pid, start = folder.name.split("-")[-2:]
        if pid.isdecimal() and start.isdecimal():
            launcher = Process(observer.host, int(pid), int(start))
            if launcher.has_ended(observer):
                shutil.rmtree(folder, ignore_errors=True)


def _own_address() -> str:
    """Return the address from which this host reaches the store's host, by which others reach it.

    An address that is not loopback is preferred, as host names may resolve to one; then IPv4.
    """
    name, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    found: list[str] = []
    for family, kind, _, _, where in socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, suppress(OSError):  # no route to this address
            probe.connect(where)
            found.append(probe.getsockname()[0])
    if not found:
        raise OSError(f"this host cannot reach any address of MASTER_ADDR={name}")
    return min(found, key=lambda address: (ip_address(address).is_loopback, ":" in address))
