"""When something fails under `nxd serve`: it says what, goes on where it can, and leaves no process and no file."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from nxd_testing import deadline

pytest.importorskip("uvicorn", reason="nxd serve needs it: pip install 'nxd-trace[serve]'")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

TRANSPORTS = {"shared memory": "1", "gloo": "0"}
GREEDY = {"prompt": "the cat", "max_tokens": 4, "temperature": 0}


class Server:
    """`nxd serve` on two workers, in a folder of its own; it listens once this is made."""

    def __init__(self, model: Path, folder: Path, transport: str) -> None:
        self.folder, self.transport = folder, transport
        self.marker = f"NXD_TEST_MARKER_{abs(hash(folder))}"
        (folder / "tmp").mkdir(exist_ok=True)
        self._log = folder / "errors.txt"
        with self._log.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "nxd_cli", "serve", str(model), "--nproc", "2", "--port", "0"),
                    *("--compiler", "export", "--batch-size", "2", "--max-length", "32"),
                ],
                cwd=folder,
                stderr=errors,
                stdout=subprocess.DEVNULL,
                env=os.environ
                | {
                    "NXD_SHM": TRANSPORTS[transport],
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder / "tmp"),
                    "XDG_CACHE_HOME": str(folder / "cache"),
                    self.marker: "1",
                },
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], object], seconds: float = 240) -> None:
        give_up = time.monotonic() + deadline(seconds)
        while not condition():
            assert time.monotonic() < give_up, self.log
            time.sleep(0.05)

    def wait_until_it_listens(self) -> None:
        self.wait_for(lambda: "running on http" in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    def text(self) -> str:
        address = re.search(r"running on (http://\S+)", self.log)
        assert address is not None
        request = urllib.request.Request(
            f"{address[1]}/v1/completions", json.dumps(GREEDY).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=deadline(60)) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.marker.encode() in entry.read_bytes():
                    found.append(int(entry.parent.name))
            except OSError:  # it has ended, or is not ours
                continue
        return found

    def workers(self) -> list[int]:
        """Those that the fork server, the server's only child, has forked."""
        (server,) = children_of(self.process.pid)
        return children_of(server)

    def files_left(self) -> list[str]:
        names = sorted(path.name for path in (self.folder / "tmp").iterdir())
        return [name for name in names if not name.startswith("torchinductor_")]

    def add_to_table(self, fault: str, seconds: float, code: int | str, first_line: str) -> None:
        """As `Training.add_to_table` in test_rank_failures.py."""
        if (table := os.environ.get("NXD_FAULT_TABLE")) is None:
            return
        seen = {"seconds": round(seconds, 1), "exit code": code, "first line": first_line, "files": self.files_left()}
        with Path(table).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": fault, "during": "serve", "ranks": self.transport, **seen}) + "\n")

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


@pytest.fixture
def serve(make_chat_model, tmp_path, fresh_python, monkeypatch):
    """`serve(transport)` starts a server, which ends with the test."""
    monkeypatch.setattr(sys, "executable", fresh_python)
    started: list[Server] = []

    def start(transport: str) -> Server:
        started.append(Server(make_chat_model("Llama"), tmp_path, transport))
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("number", "fault"), [(signal.SIGKILL, "kill -9"), (signal.SIGSTOP, "SIGSTOP")])
def test_worker_that_is_killed_or_stopped_is_named_and_replaced(serve, transport, number, fault):
    server = serve(transport)
    server.wait_until_it_listens()
    text, before = server.text(), server.workers()

    begun = time.time()
    os.kill(before[1], number)
    server.wait_for(lambda: "the new workers are running" in server.log)
    seconds = time.time() - begun

    assert server.text() == text
    assert not set(before) & set(server.workers())
    (line,) = [line for line in server.log.splitlines() if "starting new workers" in line]
    assert "rank 1 of 2" in line
    assert ("was killed by SIGKILL" if fault == "kill -9" else "was stopped by a signal") in line
    server.add_to_table(fault, seconds, "answers again", line)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("signals", "fault", "codes"),
    [
        (["SIGTERM"], "SIGTERM", [0]),
        (["SIGINT", "SIGINT"], "Ctrl-C twice", [0, 128 + signal.SIGINT]),  # 0 if the second came too late
        (["SIGKILL"], "launcher -9", [-signal.SIGKILL]),
    ],
)
def test_signal_to_the_server_ends_its_workers(serve, transport, signals, fault, codes):
    server = serve(transport)
    server.wait_until_it_listens()
    server.text()
    said = len(server.log)

    begun = time.time()
    for name in signals:
        server.process.send_signal(getattr(signal, name))
    code = server.process.wait(deadline(60))
    server.wait_for(lambda: not server.processes(), 60)

    assert code in codes
    assert "Traceback" not in server.log
    if code == 0:  # else the next server removes its model
        assert server.files_left() == []
    lines = server.log[said:].splitlines()
    server.add_to_table(fault, time.time() - begun, code, next((line for line in lines if "POST" not in line), ""))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_that_is_stopped_ends_with_the_server(serve, transport):
    server = serve(transport)
    server.wait_until_it_listens()

    os.kill(server.workers()[1], signal.SIGSTOP)
    server.process.kill()

    assert server.process.wait(deadline(60)) == -signal.SIGKILL
    server.wait_for(lambda: not server.processes(), 60)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_disk_without_room_for_temporary_files_is_one_line(serve, mount, tmp_path, transport):
    (tmp_path / "tmp").mkdir()
    mount(tmp_path / "tmp", "-t", "tmpfs", "-o", "size=64k", "tmpfs")

    begun = time.time()
    server = serve(transport)
    server.wait_for(lambda: server.process.poll() is not None)
    server.wait_for(lambda: not server.processes(), 60)

    assert server.process.returncode == 2
    *_, line = server.log.splitlines()
    line = line.replace(f"{tmp_path}/", "")
    file = r"'tmp/nxd_trace_model_\w+/tp_rank_\d\d/weights.safetensors'"
    assert re.fullmatch(rf"nxd serve: \[Errno 28\] No space left on device: {file}", line), server.log
    assert "Traceback" not in server.log
    assert server.files_left() == []
    server.add_to_table("full disk", time.time() - begun, server.process.returncode, line)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cache_that_is_read_only_is_a_warning(serve, mount, tmp_path, transport):
    (tmp_path / "cache").mkdir()
    mount(tmp_path / "cache", "-t", "tmpfs", "-o", "ro", "tmpfs")

    begun = time.time()
    server = serve(transport)
    server.wait_until_it_listens()
    seconds = time.time() - begun

    assert server.text()
    (line,) = [line for line in server.log.splitlines() if "cannot store compiled programs" in line]
    assert "Read-only file system" in line
    warning = line.partition("Warning: ")[2].replace(f"{tmp_path}/", "")
    server.add_to_table("read-only output", seconds, "serves", warning)
