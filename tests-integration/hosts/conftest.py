"""`hosts(2)`: several hosts on this machine, each with its own network, name, processes and shared memory.

A host is a network namespace of Linux with a bridge between all of them, and its programs run in namespaces of their
own for processes, mounts and the host's name. It needs root and the command `ip`; the tests are skipped elsewhere.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nxd_testing import deadline

# In the namespaces of a program: its host's name, addresses of all hosts, and empty shared memory.
ENTER = """
hostname "$1"
mount -t tmpfs -o size=256m tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs "$3"
shift 3
exec "$@"
"""


@dataclass
class Ended:
    """How a program on a host ended."""

    returncode: int
    output: str


@dataclass
class Hosts:
    """Hosts host0, host1, ... with addresses 10.77.0.1 and fd77::1 and so on.

    Attributes:
        prefix: beginning of the names of its namespaces and devices.
        count: number of hosts.
        folder: a folder that all hosts share.
        local: a path at which each program has an empty folder of its own.
    """

    prefix: str
    count: int
    folder: Path
    local: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program on a host, in the shared folder."""
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["sh", "-ec", ENTER, "sh", f"host{host}", str(self.names(host)), str(self.local)]
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"{self.prefix}{host}", *namespaces, *enter, *command],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        return process

    def names(self, host: int) -> Path:
        """The file that is /etc/hosts on a host."""
        return self.folder / f"names-of-host{host}.txt"

    def torchrun(
        self, arguments: Sequence[str], *, per_host: int = 2, address: str = "host0", on_last: Sequence[str] = ()
    ) -> list[Ended]:
        """Run a command by torchrun on all hosts, which meet at an address of the first, and wait for it.

        On the last host the command `on_last` starts torchrun.
        """
        for host in range(self.count):
            around = on_last if host == self.count - 1 else ()
            place = ["--nnodes", str(self.count), "--node-rank", str(host), "--nproc-per-node", str(per_host)]
            meet = ["--master-addr", address, "--master-port", "29500"]
            self.start(host, [*around, sys.executable, "-m", "torch.distributed.run", *place, *meet, *arguments])
        return self.wait()

    def wait(self, seconds: float = 180.0) -> list[Ended]:
        """Wait for all programs that were started; those that take too long are killed, and fail the test."""
        ended = []
        try:
            for process in self.running:
                output, _ = process.communicate(timeout=deadline(seconds))
                ended.append(Ended(process.returncode, output))
        except subprocess.TimeoutExpired:
            for process in self.running:
                process.kill()
            said = "\n".join(process.communicate()[0] for process in self.running[len(ended) :])
            pytest.fail(f"not all hosts have ended within {deadline(seconds):.0f} s; these printed:\n{said}")
        finally:
            self.end()
        return ended

    def set_link(self, host: int, state: str) -> None:
        """Unplug ("down") or plug in ("up") a host's network."""
        subprocess.run(["ip", "link", "set", f"{self.prefix}v{host}", state], check=True)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.running:
            process.kill()
            process.wait()
        self.running.clear()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _permitted() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    tried = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"]
    return subprocess.run(tried, check=False, capture_output=True).returncode == 0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """`hosts(count)`: as many hosts, see `Hosts`."""
    if not _permitted():
        pytest.skip("hosts in network namespaces need root and the command ip")
    with ExitStack() as cleanup:

        def make(count: int) -> Hosts:
            prefix = f"nxd{os.getpid() % 100_000}"
            bridge = f"{prefix}b"
            _ip("link", "add", bridge, "type", "bridge")
            cleanup.callback(_ip, "link", "del", bridge)
            _ip("link", "set", bridge, "up")
            names = ["127.0.0.1 localhost"]
            for host in range(count):
                space, cable = f"{prefix}{host}", f"{prefix}v{host}"
                _ip("netns", "add", space)
                cleanup.callback(_ip, "netns", "del", space)
                _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
                cleanup.callback(_ip, "link", "del", cable)  # by itself it would go some time after the namespace
                _ip("link", "set", cable, "master", bridge, "up")
                for address in (f"10.77.0.{host + 1}/24", f"fd77::{host + 1}/64"):
                    _ip("-n", space, "addr", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))
                # Another network, as Docker makes one, in which no other host is.
                _ip("-n", space, "link", "add", "docker0", "type", "bridge")
                _ip("-n", space, "addr", "add", "172.17.0.1/16", "dev", "docker0")
                for device in ("docker0", "eth0", "lo"):
                    _ip("-n", space, "link", "set", device, "up")
                _ip("-n", space, "route", "add", "default", "via", "10.77.0.254", "dev", "eth0")
                names.append(f"10.77.0.{host + 1} host{host}")
            local = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
            made = Hosts(prefix, count, tmp_path, local)
            for host in range(count):
                made.names(host).write_text("\n".join(names) + "\n")
            cleanup.callback(made.end)
            return made

        yield make
