"""The store of one machine: it answers as torch's own does, and this user alone."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from nxd_state import StoreServer

HELLO = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder) + b"\x0d" + b"ping"  # of torch's clients; the answer is "ping"

CALLS: dict[str, Callable[[Any], object]] = {
    "get of what was set": lambda store: (store.set("key", "value"), store.get("key")),
    "set of bytes": lambda store: (store.set("bytes", bytes(range(256))), store.get("bytes")),
    "set of nothing": lambda store: (store.set("empty", ""), store.get("empty"), store.check(["empty"])),
    "a value of many packets": lambda store: (store.set("large", "x" * 2**22), store.get("large") == b"x" * 2**22),
    "a value that is too large": lambda store: (store.set("huge", "x" * 2**24), store.get("huge")),
    "numbers": lambda store: [store.add("number", 3), store.add("number", -5), store.get("number")],
    "a number added to text": lambda store: (store.set("text", "no number"), store.add("text", 1)),
    "check": lambda store: [store.set("a", "1"), store.check(["a"]), store.check(["a", "b"]), store.check([])],
    "wait for what is there": lambda store: (store.set("a", "1"), store.wait(["a"])),
    "wait in vain": lambda store: store.wait(["never"], timedelta(milliseconds=50)),
    "get in vain": lambda store: (store.set_timeout(timedelta(milliseconds=50)), store.get("never")),
    "compare and set a new key": lambda store: (store.compare_set("c", "", "1"), store.get("c")),
    "compare and set another value": lambda store: [store.set("c", "1"), store.compare_set("c", "2", "3")],
    "compare and set the same value": lambda store: [store.set("c", "1"), store.compare_set("c", "1", "3")],
    "compare a key that is not there": lambda store: [store.compare_set("c", "2", "3"), store.check(["c"])],
    "delete": lambda store: [store.set("d", ""), store.delete_key("d"), store.delete_key("d"), store.check(["d"])],
    "append": lambda store: [store.append("a", "1"), store.append("a", "2"), store.get("a")],
    "several": lambda store: [store.multi_set(["a", "b"], ["1", "2"]), store.multi_get(["b", "a"])],
    "after a wait in vain": lambda store: [outcome_of(CALLS["wait in vain"], store), store.add("n", 1)],
    "queues": lambda store: [
        *(store.queue_len("q"), store.queue_push("q", "1"), store.queue_push("q", "2"), store.check(["q"])),
        *(store.queue_pop("q"), store.queue_pop("q"), store.queue_len("q"), store.queue_pop("q", False)),
    ],
}
if hasattr(dist.PrefixStore, "list_keys"):  # from torch 2.10 on
    CALLS["keys"] = lambda store: (store.set("a", ""), sorted(store.list_keys()))


def outcome_of(call: Callable[[Any], object], store: dist.Store) -> object:
    try:
        return call(store)
    except (dist.DistError, RuntimeError) as error:
        return type(error).__name__


def test_every_call_has_the_outcome_that_it_has_with_the_server_of_torch(run_ranks):
    def outcomes() -> list[tuple[str, object, object]]:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        found = []
        for name, call in CALLS.items():
            ours = dist.TCPStore(address, port, is_master=False)
            theirs = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            found.append((name, *(outcome_of(call, dist.PrefixStore(f"{name}/", store)) for store in (ours, theirs))))
        return found

    (found,) = run_ranks(outcomes, 1)

    assert [it for it in found if it[1] != it[2]] == []
    assert len(found) == len(CALLS)


def test_wait_ends_when_the_last_of_its_keys_is_set_by_another_rank(run_ranks):
    def meet() -> bytes:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore("wait", store)
        if dist.get_rank() == 0:
            threading.Timer(0.05, lambda: store.clone().multi_set(["first", "last"], ["1", "2"])).start()
        store.wait(["first", "last"])
        return store.get("last")

    assert run_ranks(meet, 2) == [b"2", b"2"]


def ask(port: int, request: bytes) -> bytes:
    """What the server answers to this user, until it closes the connection for what is no request."""
    with socket.create_connection(("127.0.0.1", port)) as client, client.makefile("rb") as answer:
        client.sendall(request + b"\xff")
        return answer.read()


def length(text: bytes) -> bytes:
    return len(text).to_bytes(8, sys.byteorder) + text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("lets_go", [False, True])
def test_process_of_another_user_is_not_answered_and_sets_nothing(lets_go):
    program = f"""
import os, socket
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for _ in range(20):
    client = socket.socket()
    client.connect(("127.0.0.1", PORT))
    try:
        client.sendall({HELLO + bytes([1]) + length(b"/key") + length(b"forged")!r})
        {"client.close()" if lets_go else "print(client.recv(4))"}
    except ConnectionError:
        print(b"")
"""
    with StoreServer(socket.create_server(("127.0.0.1", 0))) as store:
        program = program.replace("PORT", str(store.port))
        other = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
        is_there = ask(store.port, HELLO + bytes([5, 1, *bytes(7)]) + length(b"/key"))

    assert other.stdout == (b"" if lets_go else b"b''\n" * 20)
    assert is_there == b"ping" + b"\1"  # the server answers, and says no


def test_what_is_no_request_ends_its_connection_alone():
    with StoreServer(socket.create_server(("127.0.0.1", 0))) as store:
        strange = [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0\0", HELLO, HELLO + b"\1" + b"\xff" * 8]
        answers = [ask(store.port, request) for request in strange]

        assert answers == [b"", b"", b"ping", b"ping"]
        assert ask(store.port, HELLO) == b"ping"


def test_server_takes_a_listener_that_other_machines_cannot_reach():
    with socket.create_server(("", 0)) as listener, pytest.raises(ValueError, match=r"listen at 127\.0\.0\.1"):
        StoreServer(listener)


def test_store_process_answers_the_rank_that_has_started_it_and_ends_with_it():
    program = """
import os, signal, socket
from nxd_state import start_store_process
from torch.distributed import TCPStore
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
server = start_store_process(listener)
store = TCPStore("127.0.0.1", port, is_master=False)
store.queue_push("queue", "value")
print(store.queue_len("queue"), flush=True)  # torch holds the interpreter's lock meanwhile
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Returns once no process holds its output any more.
    rank = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.PIPE)

    assert (rank.returncode, rank.stdout) == (-signal.SIGKILL, b"1\n")
