"""A memory server gives nothing to strangers, and nothing that it is sent reaches beyond its folder or stops it."""

import errno
import json
import os
import random
import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
from nxd_ckpt import CheckpointError, latest, load, save
from nxd_elastic.peers.client import MemoryServerClient
from nxd_elastic.peers.server import CLIENT, MemoryServer, proof
from nxd_elastic.peers.starting import MemoryServerProcess
from nxd_elastic.peers.store import peers_url


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_PEERS_SECRET", "right")
    with MemoryServerProcess(tmp_path / "host", "right") as running:
        yield running


@contextmanager
def connected(address):
    """A connection whose handshake is over, and what comes through it as a file."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as connection, connection.makefile("rb") as answers:
        nonces = (answers.readline().decode().strip(), "mine")
        connection.sendall(f"mine {proof('right', CLIENT, nonces, int(port))}\n".encode())
        assert b"proof" in answers.readline()
        yield connection, answers


def write(server, name, content):
    upload = MemoryServerClient(server.address).put(name, len(content))
    upload.send(content)
    upload.finish()


def test_what_is_put_comes_back_whole_and_in_pieces(server):
    content = random.Random(0).randbytes(3 << 20)
    write(server, "t/data/a b", content)
    client = MemoryServerClient(server.address)
    pieces = [bytearray(10), bytearray(0), bytearray(2 << 20)]

    client.get("t/data/a b", [(5, memoryview(pieces[0])), (9, memoryview(pieces[1])), (700, memoryview(pieces[2]))])

    assert client.content("t/data/a b", len(content)) == content
    assert [bytes(it) for it in pieces] == [content[5:15], b"", content[700 : 700 + (2 << 20)]]
    assert client.files() == {"t/data/a b": len(content)}
    client.remove(["t/data/a b", "gone"])
    assert client.files() == {}


def test_memory_server_at_an_address_of_ipv6_keeps_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_PEERS_SECRET", "right")
    try:
        first = MemoryServerProcess(tmp_path / "first", "right", "::1")
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error}")
    with first, MemoryServerProcess(tmp_path / "second", "right", "::1") as second:
        root = peers_url([first.address, second.address], own=second.address)
        save(root, "t", {"w": torch.arange(5)})
        os.kill(first.pid, signal.SIGKILL)
        while first.death() is None:
            pass
        first.restart()
        loaded = torch.zeros(5, dtype=torch.int64)
        load(root, into={"w": loaded})

    assert first.address.startswith("[::1]:")
    assert loaded.tolist() == [0, 1, 2, 3, 4]


def test_killed_memory_server_starts_again_at_its_address_with_what_it_kept(server):
    write(server, "t/data/x", b"kept")
    before = (server.address, server.pid)
    os.kill(server.pid, signal.SIGKILL)
    while server.death() is None:
        pass

    with pytest.raises(OSError, match="cannot be reached"):  # at once: nobody listens meanwhile
        MemoryServerClient(server.address).files()
    assert server.death() == "was killed by SIGKILL"
    server.restart()

    assert server.death() is None
    assert server.address == before[0]
    assert server.pid != before[1]
    assert MemoryServerClient(server.address).content("t/data/x", 10) == b"kept"


def test_stopped_memory_server_owes_an_answer_until_another_one_serves_what_it_kept(server, deadline):
    write(server, "t/data/x", b"kept")
    address, give_up = server.address, time.monotonic() + deadline(30)
    os.kill(server.pid, signal.SIGSTOP)
    while server.silence() < 0.2:
        assert time.monotonic() < give_up
    server.kill()
    server.restart()

    for _ in range(3):
        while server.silence() > 0:
            assert time.monotonic() < give_up
    assert server.address == address
    assert MemoryServerClient(server.address).content("t/data/x", 10) == b"kept"


def test_stopped_memory_server_can_be_closed(tmp_path):
    server = MemoryServerProcess(tmp_path / "host", "right")
    os.kill(server.pid, signal.SIGSTOP)

    server.close()

    assert server.death() == "was killed by SIGKILL"


@pytest.mark.parametrize("secret", ["wrong", "righ", "rightt"])
def test_another_secret_is_refused(server, monkeypatch, secret):
    write(server, "t/manifest.json", b"{}")
    monkeypatch.setenv("NXD_PEERS_SECRET", secret)

    with pytest.raises(OSError, match="wrong secret for this job"):
        MemoryServerClient(server.address).files()
    with pytest.raises(OSError, match=r"secret|cannot be reached"):
        write(server, "t/data/x", b"1" * (1 << 20))


def test_no_secret_says_which_variable_to_set(server, monkeypatch):
    monkeypatch.delenv("NXD_PEERS_SECRET")

    with pytest.raises(CheckpointError, match="NXD_PEERS_SECRET is not set"):
        latest(peers_url([server.address], server.address))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ".lock", "a//b", "", "a/.b", "a\0b", 7, None])
def test_names_outside_the_folder_are_refused(server, tmp_path, name):
    client = MemoryServerClient(server.address)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(OSError, match="is not a file name"):
        write(server, name, b"1")
    with pytest.raises(OSError, match="is not a file name"):
        client.content(name, 10)

    assert sorted(tmp_path.iterdir()) == before
    assert client.files() == {}


def test_a_writer_that_dies_leaves_nothing(server, tmp_path):
    upload = MemoryServerClient(server.address).put("t/data/x", 1000)
    upload.send(b"1" * 100)
    upload.close()
    write(server, "t/data/y", b"2")

    assert MemoryServerClient(server.address).files() == {"t/data/y": 1}


def test_a_read_beyond_the_end_is_refused(server):
    write(server, "x", b"123")

    with pytest.raises(OSError, match="x has 3 bytes, fewer than requested"):
        MemoryServerClient(server.address).get("x", [(2, memoryview(bytearray(2)))])


def test_garbage_does_not_stop_it(server):
    draw = random.Random(1)
    requests = [{"do": do} for do in ("put", "get", "list", "remove", "size", "eval", None)]
    requests += [{"do": "get", "name": "x", "pieces": it} for it in (7, [[-1, 5]], [["a", 1]], [[1]])]
    sent = [json.dumps(it).encode() + b"\n" for it in (*requests, [], 3)]
    sent += [draw.randbytes(draw.randrange(200)) + b"\n" for _ in range(50)]
    sent += [json.dumps({"do": "put", "name": "x", "bytes": 9}).encode() + end for end in (b"\nmany\n", b"\n-5\n")]

    for content in sent:
        with connected(server.address) as (connection, answers):
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            answers.read()

    write(server, "y", b"still here")
    assert MemoryServerClient(server.address).files() == {"y": 10}


@pytest.mark.parametrize("greeting", [b"", b"\n", b"mine 00\n", b"\xff \xff\n", b"[" * (1 << 20)])
def test_who_proves_nothing_is_refused_before_more_is_read(server, greeting):
    host, _, port = server.address.rpartition(":")

    with socket.create_connection((host, int(port)), 30) as stranger, suppress(ConnectionError):
        stranger.sendall(greeting)
        if not greeting:
            stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass

    write(server, "y", b"still here")


def test_strangers_who_only_connect_take_few_threads_and_keep_nobody_out(server):
    host, _, port = server.address.rpartition(":")
    with ExitStack() as strangers:
        for _ in range(600):
            strangers.enter_context(socket.create_connection((host, int(port)), 30))

        write(server, "y", b"still here")
        threads = len(os.listdir(f"/proc/{server.pid}/task"))

    assert MemoryServerClient(server.address).content("y", 100) == b"still here"
    assert threads < 530


@pytest.mark.parametrize("proof_of_it", ['{"proof": "00"}', "{}", "no JSON"])
def test_stranger_at_the_address_of_a_memory_server_learns_no_secret_and_is_not_believed(monkeypatch, proof_of_it):
    monkeypatch.setenv("NXD_PEERS_SECRET", "right")
    heard = []

    def pass_for_a_memory_server():
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"nonce\n")
            heard.append(connection.recv(1 << 16))
            connection.sendall(f'{proof_of_it}\n{{"bytes": 4}}\nfake'.encode())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        stranger = threading.Thread(target=pass_for_a_memory_server)
        stranger.start()
        with pytest.raises(OSError, match="not a memory server of this job"):
            MemoryServerClient(f"127.0.0.1:{listening.getsockname()[1]}").content("t/manifest.json", 10)
        stranger.join()

    assert b"right" not in heard[0]
    assert b"manifest" not in heard[0]


def test_proof_is_for_one_memory_server_and_one_connection(server):
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as connection, connection.makefile("rb") as answers:
        nonces = (answers.readline().decode().strip(), "mine")
        connection.sendall(f"mine {proof('right', CLIENT, nonces, int(port) + 1)}\n".encode())

        assert b"wrong secret for this job" in answers.readline()


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_folder_that_others_may_have_made_is_refused(tmp_path, kind):
    folder = tmp_path / "host"
    folder.mkdir()
    folder.chmod(0o700 if kind == "a link" else 0o777)
    if kind == "a link":
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "host")

    with pytest.raises(OSError, match="must be private to this user"):
        MemoryServer(folder, "127.0.0.1", "right")


def test_writer_whose_host_is_gone_leaves_nothing(tmp_path):
    with MemoryServer(tmp_path / "host", "127.0.0.1", "right", silence=0.1) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        with connected(server.address) as (connection, answers):
            connection.sendall(b'{"do": "put", "name": "x", "bytes": 100}\n100\nabc')

            assert answers.read() == b""  # it has hung up by itself

        server.shutdown()
        serving.join()

    assert [it for it in (tmp_path / "host").rglob("*") if it.is_file() and it.name != ".lock"] == []


def test_file_that_cannot_be_written_says_why(server, tmp_path):
    (tmp_path / "host/.partial").rmdir()

    with pytest.raises(OSError, match="No such file or directory"):
        write(server, "x", bytes(8 << 20))


def test_file_without_room_is_refused_with_what_it_needs_and_what_is_free(server, tmp_path):
    upload = MemoryServerClient(server.address).put("x", 1 << 60)
    upload.send(b"1" * (1 << 20))

    with pytest.raises(OSError, match=r"no room for a file of 1,152,921,504,606,846,976 bytes: [\d,]+ are free in "):
        upload.finish()

    assert MemoryServerClient(server.address).files() == {}
    assert list((tmp_path / "host/.partial").iterdir()) == []


def test_two_files_do_not_get_the_same_room(tmp_path, monkeypatch):
    def is_full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "taken by another file meanwhile")

    monkeypatch.setenv("NXD_PEERS_SECRET", "right")
    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with MemoryServer(tmp_path / "host", "127.0.0.1", "right") as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()

        with pytest.raises(CheckpointError, match=r"saving checkpoint 't' .* no room for a file of [\d,]+ bytes"):
            save(peers_url([server.address]), "t", {"w": torch.ones(100)})

        server.shutdown()
        serving.join()


def test_file_of_another_length_than_was_said_does_not_appear(server):
    upload = MemoryServerClient(server.address).put("x", 10)
    upload.send(b"123")

    with pytest.raises(OSError, match="expected 10 bytes, got 3"):
        upload.finish()

    assert MemoryServerClient(server.address).files() == {}


def test_file_that_is_larger_than_it_may_be_is_not_read(server):
    write(server, "x", b"123")

    with pytest.raises(OSError, match=r"x at memory server .* has 3 bytes; expected at most 2"):
        MemoryServerClient(server.address).content("x", 2)


def test_memory_server_ends_when_closed_though_a_fork_of_its_starter_lives_on(tmp_path):
    server = MemoryServerProcess(tmp_path / "host", "right")
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        signal.pause()
        os._exit(0)

    server.close()

    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
