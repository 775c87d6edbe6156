"""The memory servers of a job, for checkpoints in memory: one per host, started by the supervisor of its first rank.

A memory server outlives the trainers of its host; one that dies is started again at the same address, and one that is
stopped is killed first. Its folder is named for the launcher's agent, so that supervisors which the agent starts again
find what was kept; the folder of an agent that has ended is removed by the next run of this user.
"""

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist
from nxd_state.processes import Process

from nxd_elastic.peers.server import SECRET
from nxd_elastic.peers.starting import MemoryServerProcess
from nxd_elastic.peers.store import OWN_SERVER, SERVERS

_MEMORY = Path("/dev/shm")
_PREFIX = "nxd-memory"
_SECRET_KEY = "nxd_elastic/secret"
_LONGEST_PAUSE = 60.0  # seconds between two starts of a memory server that dies again and again


class HostMemory:
    """What a supervisor does for the checkpoints in its host's memory; nothing if it is not that of the first rank.

    Args:
        silence: seconds for which the memory server may owe an answer before it is killed.

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
        if SECRET not in os.environ:  # our own launcher gives one; over several hosts the store is all that ranks share
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
            os.environ[SECRET] = store.compare_set(_SECRET_KEY, "", secrets.token_hex()).decode()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        launcher = Process.of(os.getppid())
        _remove_those_of_ended_launchers(launcher)
        self._folder = _folder_of(launcher)
        self._server = MemoryServerProcess(self._folder, os.environ[SECRET], _own_address())
        self.address = self._server.address

    def revive(self) -> None:
        """If the memory server has died or does not answer start another one, which serves what was kept."""
        if self._server is None:
            return
        death, now = self._server.death(), time.monotonic()
        if death is None and self._server.silence() > self._silence:
            self._server.kill()
            death = f"has not answered for {self._silence:g} s and was killed"
        if death is None or now < self._next_start:
            return
        self._pause = 1.0 if now - self._next_start > _LONGEST_PAUSE else min(2 * self._pause, _LONGEST_PAUSE)
        self._next_start = now + self._pause
        try:
            self._server.restart()
            outcome = "it was restarted with its contents"
        except OSError as error:
            outcome = f"it could not be restarted: {error}; the next attempt is in {self._pause:g} s"
        print(f"nxd elastic: the memory server of this host {death}; {outcome}", file=sys.stderr, flush=True)

    def close(self, *, forget: bool) -> None:
        """End the memory server.

        Args:
            forget: remove what it kept, as the run has ended.
        """
        if self._server is not None:
            self._server.close()
            if forget:
                shutil.rmtree(self._folder, ignore_errors=True)


def use_memory_servers(servers: Sequence[str], own: str) -> None:
    """Tell this process's checkpoints where the memory of the hosts is.

    Args:
        servers: of each host, in the same order on all ranks.
        own: that of this host.
    """
    os.environ |= {SERVERS: ",".join(servers), OWN_SERVER: own}


def _folder_of(launcher: Process) -> Path:
    return _MEMORY / f"{_prefix(launcher)}-{launcher.pid}-{launcher.start}"


def _prefix(process: Process) -> str:
    """With the namespace of its number: containers may share this memory, and not the numbers of their processes."""
    namespace = "".join(filter(str.isdecimal, process.host.rpartition("/")[2]))
    return f"{_PREFIX}-{os.getuid()}-{namespace}"


def _remove_those_of_ended_launchers(observer: Process) -> None:
    for folder in _MEMORY.glob(f"{_prefix(observer)}-*"):
        pid, start = folder.name.split("-")[-2:]
        if pid.isdecimal() and start.isdecimal():
            launcher = Process(observer.host, int(pid), int(start))
            if launcher.has_ended(observer):
                shutil.rmtree(folder, ignore_errors=True)


def _own_address() -> str:
    """The address by which this host reaches the store's, and so others reach this one.

    Of several the first that is no loopback, as names of hosts may have one; of IPv4 rather than of IPv6.
    """
    name, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    found: list[str] = []
    for family, kind, _, _, where in socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, suppress(OSError):  # no route to that one
            probe.connect(where)
            found.append(probe.getsockname()[0])
    if not found:
        raise OSError(f"this host cannot reach any address of MASTER_ADDR={name}")
    return min(found, key=lambda address: (ip_address(address).is_loopback, ":" in address))
