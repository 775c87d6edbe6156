"""Ranks that are started on this machine: their environment, their end, and the exit code made of theirs."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from nxd_cli.launch import launch_ranks, threads_per_rank


def run(program: str, nproc: int = 2) -> int:
    return launch_ranks(nproc, [sys.executable, "-c", program])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_store_listens_on_loopback_only(tmp_path):
    program = f"""
import os, pathlib, time
port, address = int(os.environ["MASTER_PORT"]), os.environ["MASTER_ADDR"]
tables = [pathlib.Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
rows = [line.split() for table in tables for line in table.splitlines()[1:]]
listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{{port:04X}}")]
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(address + " " + " ".join(listening))
"""
    assert run(program) == 0

    for rank in ("0", "1"):
        address, listening = (tmp_path / rank).read_text().split()
        assert address == "127.0.0.1"
        assert listening.startswith("0100007F:")


def test_ranks_meet_through_the_store_that_the_launcher_serves():
    program = """
import os
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store.set(os.environ["RANK"], "here")
store.wait(["0", "1"])
"""
    assert run(program) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_store_does_not_answer_another_user(tmp_path):
    hello = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder) + b"\x0d" + b"ping"  # as torch's clients begin
    program = f"""
import contextlib, os, pathlib, socket
answer = pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).open("wb")
if os.environ["RANK"] == "1":
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
client = socket.socket()
client.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
with answer, contextlib.suppress(ConnectionError):
    client.sendall({hello!r})
    answer.write(client.recv(4))
"""
    assert run(program) == 0

    assert [(tmp_path / rank).read_bytes() for rank in ("0", "1")] == [b"ping", b""]


@pytest.mark.parametrize(("load", "nproc", "threads"), [(0.2, 1, 8), (0.2, 2, 4), (5.1, 1, 3), (5.1, 2, 1), (90, 2, 1)])
def test_ranks_divide_the_cores_that_the_load_leaves(monkeypatch, load, nproc, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("nxd_cli.launch._cores_of_container", lambda: math.inf)

    assert threads_per_rank(nproc) == threads


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(7 if RANK == 1 else 5)", 7, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(1 if RANK == 1 else 5)", 1, "nxd: rank 1 failed first; the other ranks have ended\n"),
        (
            "import os, signal, sys; os.kill(os.getpid(), signal.SIGKILL) if RANK == 1 else sys.exit(5)",
            1,
            "nxd: rank 1 was killed by SIGKILL (signal 9)\n",
        ),
    ],
)
def test_exit_code_is_that_of_the_rank_that_failed_by_itself(capfd, program, code, said):
    assert run(f"import os; RANK = int(os.environ['RANK']); {program}") == code
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(("failing", "waiting"), [(0, 1), (1, 0)])
def test_rank_that_does_not_end_after_a_failure_is_killed(tmp_path, capfd, monkeypatch, failing, waiting):
    monkeypatch.setattr("nxd_cli.launch.SECONDS_TO_END", 0.2)
    program = f"""
import os, pathlib, time
if os.environ["RANK"] == "{failing}":
    raise SystemExit(1)
time.sleep(60)
pathlib.Path({str(tmp_path)!r}, "woke").touch()
"""

    assert run(program) == 1

    assert f"nxd: rank {waiting} did not end 0.2 s after the failure and was killed" in capfd.readouterr().err
    assert not (tmp_path / "woke").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_handed_on_and_ends_the_ranks(tmp_path, number):
    program = f"""
import os, pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path({str(tmp_path)!r}, "got" + os.environ["RANK"]).write_text(str(number))
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text("")
while True: time.sleep(0.05)
"""

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    handled_before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    code = run(program)
    thread.join()

    assert code == 143
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    assert signal.getsignal(signal.SIGTERM) is handled_before


def test_rank_that_waits_for_one_that_a_signal_has_killed_is_killed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("nxd_cli.launch.SECONDS_TO_STOP", 0.2)
    program = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL if os.environ["RANK"] == "0" else signal.SIG_IGN)
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).touch()
time.sleep(3600)
"""

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = run(program)
    thread.join()

    assert code == 143
    assert "nxd: rank 1 did not end 0.2 s after the signal and was killed" in capfd.readouterr().err


def test_rank_that_loads_its_modules_is_ended_by_an_interrupt_at_once(fresh_python, tmp_path):
    (tmp_path / "hello-1.0.dist-info").mkdir()
    (tmp_path / "hello-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n")
    (tmp_path / "hello-1.0.dist-info/entry_points.txt").write_text("[nxd.commands]\nhello = hello:main\n")
    (tmp_path / "hello.py").write_text("""
import signal
try:
    signal.raise_signal(signal.SIGINT)  # which an import may swallow, as torch's does
except KeyboardInterrupt:
    pass
main = len
""")
    program = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which it is not in the background
runpy.run_module("nxd_cli", run_name="__main__")
"""
    ended = subprocess.run(
        [fresh_python, "-c", program, "hello"],
        env=os.environ | {"RANK": "0", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )

    assert ended.returncode == -signal.SIGINT


def test_command_that_cannot_be_started_is_an_error_and_leaves_no_process():
    with pytest.raises(FileNotFoundError):
        launch_ranks(2, ["/no/such/program"])


def test_rank_ends_at_once_where_its_launcher_has_ended():
    program = "from nxd_cli.launch import end_with_launcher; end_with_launcher(); print('lives on')"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    of_rank = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NXD_LAUNCHER_PID": str(ended.pid)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (of_rank.returncode, of_rank.stdout) == (143, "")


def make_folder_of_torchrun(tmp: Path, name: str, *, seconds_old: float = 0.0) -> Path:
    of_rank = tmp / f"torchelastic_{name}" / "none_x" / "attempt_0" / "0"
    of_rank.mkdir(parents=True)
    then = time.time() - seconds_old
    for path in (of_rank, *list(of_rank.parents)[:3]):
        os.utime(path, (then, then))
    return of_rank / "error.json"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_folders_of_torchrun_are_removed_if_they_are_this_ranks_or_empty_and_of_the_dead(tmp_path, fresh_python):
    own = make_folder_of_torchrun(tmp_path, "own")
    make_folder_of_torchrun(tmp_path, "of_the_dead", seconds_old=3600)
    make_folder_of_torchrun(tmp_path, "that_begins")
    alive = make_folder_of_torchrun(tmp_path, "of_the_living", seconds_old=3600)
    with_log = make_folder_of_torchrun(tmp_path, "with_a_log", seconds_old=3600)
    with_log.write_text("a log")
    program = "from nxd_cli.launch import remove_torchrun_folders; remove_torchrun_folders()"
    waits = [fresh_python, "-c", "input()"]

    with subprocess.Popen(waits, stdin=subprocess.PIPE, env={"TORCHELASTIC_ERROR_FILE": str(alive)}) as living:
        environment = os.environ | {"TMPDIR": str(tmp_path), "TORCHELASTIC_ERROR_FILE": str(own)}
        subprocess.run([fresh_python, "-c", program], env=environment, check=True)
        living.communicate(b"\n")

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"torchelastic_that_begins", "torchelastic_of_the_living", "torchelastic_with_a_log"}
    assert with_log.read_text() == "a log"
