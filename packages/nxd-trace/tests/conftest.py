import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import nxd_trace
import pytest

# Worker processes import the models by name, along the path of the process that starts them.
sys.path.insert(0, str(Path(__file__).parent / "programs"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Compiled programs of the tests are not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def trace():
    """`parallel_model_trace` by the quick compiler; closes the models at the end."""
    models = []

    def trace_model(func, inputs, **settings):
        settings = {"compiler": "export", "progress": False, **settings}
        models.append(nxd_trace.parallel_model_trace(func, inputs, **settings))
        return models[-1]

    yield trace_model
    while models:  # pytest keeps the fixture, and so what it refers to, until the test is reported
        models.pop().close()


@pytest.fixture
def running_workers():
    """`running_workers()`: process ids of the workers of this process that have not ended."""

    def children_of(parent):
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                state, of = path.read_text().rpartition(")")[2].split()[:2]
                if int(of) == parent and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def of_all_servers():
        servers = [pid for pid in children_of(os.getpid()) if "fork_server" in Path(f"/proc/{pid}/cmdline").read_text()]
        return [worker for server in servers for worker in children_of(server)]

    return of_all_servers


class ServerProcess:
    """`serve_tiny.py`, once it listens.

    Attributes:
        process: which runs it.
        workers: process ids of the model's.
        log: the lines that it has logged so far, as far as they have been read.
    """

    def __init__(self, limits, restarts, steps, folder):
        script = Path(__file__).parent / "programs" / "serve_tiny.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(limits), json.dumps(restarts), *([str(steps)] if steps else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        self.log = []
        self.workers = [int(pid) for pid in self.process.stdout.readline().split()]
        self.port = int(re.search(r":(\d+) ", self.log_until("running on"))[1])

    def log_until(self, text):
        """The next line that has this text."""
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"the server ended without {text!r}: {''.join(self.log)}")

    def connect(self, timeout):
        """A connection whose reads raise TimeoutError after so many seconds."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def request(self, body, timeout):
        """A connection on which a completion has been asked for."""
        client = self.connect(timeout)
        data = json.dumps(body).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        return client

    def wait(self, timeout):
        """Its exit code, once the rest of the log has been read."""
        self.log += self.process.communicate(timeout=timeout)[1].splitlines(keepends=True)
        return self.process.returncode

    def close(self):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture(scope="module")
def serve_tiny(tmp_path_factory):
    """`serve_tiny(limits, restarts, steps)` starts a server of the tiny decoder, which ends with the module's tests."""
    servers = []

    def start(limits=None, restarts=None, steps=None):
        servers.append(ServerProcess(limits or {}, restarts or {}, steps, tmp_path_factory.mktemp("server")))
        return servers[-1]

    yield start
    while servers:
        servers.pop().close()
