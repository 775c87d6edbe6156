"""Where the memory of a host lies and who keeps it."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from nxd_cli.launch import PEERS_SECRET
from nxd_elastic.peers.client import MemoryServerClient
from nxd_elastic.peers.server import SECRET
from nxd_elastic.peers.starting import HostMemory
from nxd_state.processes import Process


def test_launcher_gives_the_secret_by_the_name_that_memory_servers_read():
    assert PEERS_SECRET == SECRET


@pytest.fixture
def memory_folder(monkeypatch, tmp_path):
    """The folder that is this host's memory, for a supervisor of the first rank."""
    monkeypatch.setattr("nxd_elastic.peers.starting._MEMORY", tmp_path)
    monkeypatch.setattr("nxd_elastic.peers.starting._own_address", lambda: "127.0.0.1")
    monkeypatch.setenv(SECRET, "of the test")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no memory to keep files in")
def test_memory_of_another_namespace_is_not_removed_and_that_of_an_ended_launcher_is(memory_folder):
    own = "".join(filter(str.isdecimal, Process.of(os.getpid()).host.rpartition("/")[2]))
    elsewhere, ended = (memory_folder / f"nxd-memory-{os.getuid()}-{it}-999999-1" for it in ("123", own))
    elsewhere.mkdir()
    ended.mkdir()

    memory = HostMemory(silence=10)
    memory.close(forget=True)

    assert [it.name for it in memory_folder.iterdir()] == [elsewhere.name]


def process_of(folder):
    """The memory server that serves a folder below this one; this process has started it."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return next(int(pid) for pid in own if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no memory to keep files in")
def test_stopped_memory_server_is_killed_and_replaced_and_the_log_says_so(memory_folder, capfd, deadline):
    memory = HostMemory(silence=1)
    client, give_up, log = MemoryServerClient(memory.address), time.monotonic() + deadline(30), ""
    with closing(client.put("t/data/x", 4)) as upload:
        upload.send(b"kept")
        upload.finish()
    os.kill(process_of(memory_folder), signal.SIGSTOP)
    while "restarted" not in log:
        memory.restart_if_dead()
        log += capfd.readouterr().err
        assert time.monotonic() < give_up

    assert log == (
        "nxd elastic: the memory server of this host has not answered for 1 s and was killed; it was restarted with "
        "its contents\n"
    )
    assert client.content("t/data/x", 10) == b"kept"
    memory.close(forget=True)
