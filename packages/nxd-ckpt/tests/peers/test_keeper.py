"""A keeper gives nothing to strangers, and nothing that it is sent reaches beyond its folder or stops it."""

import json
import random
import socket

import pytest
from nxd_ckpt import CheckpointError, latest
from nxd_ckpt.peers.client import KeeperClient
from nxd_ckpt.peers.starting import KeeperProcess
from nxd_ckpt.peers.store import peers_url


@pytest.fixture
def keeper(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_PEERS_SECRET", "right")
    with KeeperProcess(tmp_path / "host", "right") as running:
        yield running


def write(keeper, name, content):
    upload = KeeperClient(keeper.address).put(name)
    upload.send(content)
    upload.finish()


def test_what_is_put_comes_back_whole_and_in_pieces(keeper):
    content = random.Random(0).randbytes(3 << 20)
    write(keeper, "t/data/a b", content)
    client = KeeperClient(keeper.address)
    pieces = [bytearray(10), bytearray(0), bytearray(2 << 20)]

    client.get("t/data/a b", [(5, memoryview(pieces[0])), (9, memoryview(pieces[1])), (700, memoryview(pieces[2]))])

    assert client.content("t/data/a b") == content
    assert [bytes(it) for it in pieces] == [content[5:15], b"", content[700 : 700 + (2 << 20)]]
    assert client.files() == {"t/data/a b": len(content)}
    client.remove(["t/data/a b", "gone"])
    assert client.files() == {}


@pytest.mark.parametrize("secret", ["wrong", "righ", "rightt"])
def test_another_secret_is_refused(keeper, monkeypatch, secret):
    write(keeper, "t/manifest.json", b"{}")
    monkeypatch.setenv("NXD_PEERS_SECRET", secret)

    with pytest.raises(OSError, match="the secret is not that of this job"):
        KeeperClient(keeper.address).files()
    with pytest.raises(OSError, match=r"the secret|cannot be reached"):
        write(keeper, "t/data/x", b"1" * (1 << 20))


def test_no_secret_says_which_variable_to_set(keeper, monkeypatch):
    monkeypatch.delenv("NXD_PEERS_SECRET")

    with pytest.raises(CheckpointError, match="NXD_PEERS_SECRET is not set"):
        latest(peers_url([keeper.address], keeper.address))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ".lock", "a//b", "", "a/.b", "a\0b", 7, None])
def test_names_outside_the_folder_are_refused(keeper, tmp_path, name):
    client = KeeperClient(keeper.address)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(OSError, match="is no name of a file"):
        write(keeper, name, b"1")
    with pytest.raises(OSError, match="is no name of a file"):
        client.content(name)

    assert sorted(tmp_path.iterdir()) == before
    assert client.files() == {}


def test_a_writer_that_dies_leaves_nothing(keeper, tmp_path):
    upload = KeeperClient(keeper.address).put("t/data/x")
    upload.send(b"1" * 100)
    upload.close()
    write(keeper, "t/data/y", b"2")

    assert KeeperClient(keeper.address).files() == {"t/data/y": 1}


def test_a_read_beyond_the_end_is_refused(keeper):
    write(keeper, "x", b"123")

    with pytest.raises(OSError, match="x has 3 bytes, fewer than are asked for"):
        KeeperClient(keeper.address).get("x", [(2, memoryview(bytearray(2)))])


def test_garbage_does_not_stop_it(keeper):
    draw = random.Random(1)
    requests = [{"do": do, "secret": "right"} for do in ("put", "get", "list", "remove", "size", "eval", None)]
    requests += [
        {"do": "get", "secret": "right", "name": "x", "pieces": it} for it in (7, [[-1, 5]], [["a", 1]], [[1]])
    ]
    sent = [json.dumps(it).encode() + b"\n" for it in (*requests, [], 3, {"secret": 5})]
    sent += [draw.randbytes(draw.randrange(200)) + b"\n" for _ in range(100)]
    sent += [json.dumps({"do": "put", "secret": "right", "name": "x"}).encode() + b"\nmany\n"]
    sent += [json.dumps({"do": "put", "secret": "right", "name": "x"}).encode() + b"\n-5\n"]
    host, _, port = keeper.address.rpartition(":")

    for content in sent:
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    write(keeper, "y", b"still here")
    assert KeeperClient(keeper.address).files() == {"y": 10}
