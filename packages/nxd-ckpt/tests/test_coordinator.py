"""Gathering through a torch store: values in order, nobody waits for ever, and the missing rank is named."""

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import threading
import zlib

import pytest
import torch
import torch.distributed as dist
from nxd_ckpt import CheckpointError, list_checkpoints, load, save
from nxd_ckpt.store_coordinator import StoreCoordinator

pytestmark = pytest.mark.sample(14)  # each takes its time


def on_threads(function, world_size, timeout=60.0):
    """What each rank returned or raised; a rank is a thread of its own, over one store."""
    store = dist.HashStore()
    outcomes = [None] * world_size

    def run(rank):
        try:
            outcomes[rank] = function(StoreCoordinator(store, rank, world_size, prefix="test", timeout=timeout))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, store


def test_gather_gives_every_rank_all_values_in_order_round_after_round():
    large = os.urandom(9 * 2**20).hex()  # more than a store takes at once

    def value(rank, i):
        return [rank, i, large if (rank, i) == (1, 0) else ""]

    outcomes, _ = on_threads(lambda ranks: [ranks.all_gather_object(value(ranks.rank, i)) for i in range(3)], 3)

    assert outcomes == [[[value(rank, i) for rank in range(3)] for i in range(3)]] * 3


def test_gather_leaves_only_the_last_rounds_keys_in_the_store():
    def count_keys(num_rounds):
        def gather(ranks):
            for i in range(num_rounds):
                ranks.all_gather_object(i)

        return on_threads(gather, 2)[1].num_keys()

    assert count_keys(2) == count_keys(9)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_gather_rank_that_does_not_answer_is_named_by_all_others(absent):
    def gather(ranks):
        return None if ranks.rank == absent else ranks.all_gather_object("here")

    outcomes, _ = on_threads(gather, 3, timeout=0.3)

    present = [outcome for rank, outcome in enumerate(outcomes) if rank != absent]
    assert all(isinstance(outcome, CheckpointError) for outcome in present)
    assert {str(outcome) for outcome in present} == {
        f"no answer within 0.3 seconds from rank {absent} of 3; it is stopped, gone, or needs longer than timeout="
    }


def test_gather_rank_that_comes_too_late_raises_the_same():
    others_gave_up = threading.Event()

    def gather(ranks):
        if ranks.rank == 1:
            others_gave_up.wait()
        try:
            return ranks.all_gather_object("here")
        finally:
            others_gave_up.set()

    outcomes, _ = on_threads(gather, 2, timeout=0.3)

    assert str(outcomes[0]) == str(outcomes[1])
    assert "from rank 1 of 2" in str(outcomes[1])


def test_gather_after_a_session_that_a_rank_left_halfway_is_in_step_again():
    def gather(ranks):
        ranks.begin(0.3)
        if ranks.rank == 0:
            with pytest.raises(CheckpointError, match="from rank 1 of 2"):
                ranks.all_gather_object("first")
        ranks.begin(60.0)
        return ranks.all_gather_object(f"second {ranks.rank}")

    outcomes, _ = on_threads(gather, 2)

    assert outcomes == [["second 0", "second 1"]] * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [threading.Lock(), {1: 2}, [b""], "\ud800"], ids=["lock", "key", "bytes", "half"])
def test_gather_value_that_json_cannot_hold_raises_on_all_ranks_at_once(value):
    outcomes, _ = on_threads(lambda ranks: ranks.all_gather_object(value if ranks.rank == 1 else 1), 2, timeout=3600)

    assert "rank 1 of 2 cannot send its message: a" in str(outcomes[1])
    assert "rank 1 of 2 cannot send its message: a" in str(outcomes[0])


class _Bomb:
    def __init__(self, file):
        self._file = file

    def __reduce__(self):
        return os.mkdir, (str(self._file),)


MESSAGES = {
    "pickle": lambda bomb: zlib.compress(pickle.dumps(bomb)),
    "pickle of a value": lambda bomb: zlib.compress(pickle.dumps((None, bomb))),
    "uncompressed": pickle.dumps,
    "nothing": lambda bomb: b"",
    "no pair": lambda bomb: zlib.compress(b"[1]"),
    "process that is none": lambda bomb: zlib.compress(b'[["here", "../../..", "0"], 1]'),
    "cut off": lambda bomb: zlib.compress(b"[null, 1]")[:-5],
    "very deep": lambda bomb: zlib.compress(b"[" * 200_000),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
@pytest.mark.parametrize("key", ["1", "all"])
def test_gather_what_a_stranger_put_into_the_store_is_an_error_and_not_run(tmp_path, message, key):
    """The stranger speaks for rank 1, or for rank 0 to all."""
    store = dist.HashStore()
    content = message(_Bomb(tmp_path / "exploded"))
    keys = {f"test/0/0/{key}/part0": content, f"test/0/0/{key}": b"1"}
    if key == "all":
        keys |= {"test/0/0/outcome": b"complete"}
    for name, value in keys.items():
        store.set(name, value)
    ranks = StoreCoordinator(store, 0 if key == "1" else 1, 2, prefix="test", timeout=5.0)

    with pytest.raises(CheckpointError, match=f"rank {ranks.rank} of 2 lost contact with the other ranks: "):
        ranks.all_gather_object("mine")

    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("key", "forged", "said"),
    [
        ("test/0/0/outcome", b"\x1b[2Jgone", r"^\\x1b\[2Jgone$"),
        ("test/0/0/1", b"\x1b[2J", r"the store holds an invalid number of message parts, b'\\x1b\[2J'$"),
        ("test/left", b"{", "the store holds an invalid leave message: Expecting property name"),
    ],
)
def test_gather_text_of_a_stranger_is_told_as_such_and_cannot_steer_a_terminal(monkeypatch, key, forged, said):
    monkeypatch.setattr("nxd_ckpt.store_coordinator._CHECK_SECONDS", 0.0)
    store = dist.HashStore()
    store.set(key, forged)
    ranks = StoreCoordinator(store, 1 if key.endswith("outcome") else 0, 2, prefix="test", timeout=5.0)

    with pytest.raises(CheckpointError, match=said) as raised:
        ranks.all_gather_object("mine")

    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "sent",
    [
        None,
        [],
        [1, 2, 3],
        [{"a": 1}, None],
        [["x"], None],
        [None, 5],
        [["a", ["t", None, False, False, False], None], None],
    ],
)
def test_save_message_of_another_kind_from_a_rank_is_an_error_of_one_line_that_names_it(tmp_path, sent):
    class Others:
        rank, world_size = 0, 2

        def all_gather_object(self, value):
            return [value, sent]

    with pytest.raises(CheckpointError, match="rank 1 sent an unexpected message") as raised:
        save(tmp_path, "t", {"w": torch.ones(2)}, process_group=Others())

    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["abandon", "leave"])
def test_gather_rank_that_leaves_is_named_by_the_others_long_before_the_deadline(way):
    def gather(ranks):
        ranks.begin(3600.0)
        if ranks.rank == 1:
            return getattr(ranks, way)("ended its work: ValueError: no more data")
        return ranks.all_gather_object("here")

    outcomes, _ = on_threads(gather, 3)

    assert str(outcomes[0]) == str(outcomes[2]) == "rank 1 of 3 ended its work: ValueError: no more data"
    assert outcomes[1] is None


def test_gather_rank_that_has_left_is_missed_by_later_sessions_until_it_begins_again():
    heard = threading.Event()

    def gather(ranks):
        if ranks.rank == 1:
            ranks.begin(60.0)
            ranks.leave("ended its work")
            heard.wait()
            ranks.begin(60.0)
            return ranks.all_gather_object("back")
        ranks.begin(3600.0)
        try:
            with pytest.raises(CheckpointError, match="rank 1 of 2 ended its work"):
                ranks.all_gather_object("first")
        finally:
            heard.set()
        ranks.begin(60.0)
        return ranks.all_gather_object("second")

    outcomes, _ = on_threads(gather, 2)

    assert outcomes == [["second", "back"]] * 2


def test_gather_rank_that_abandoned_an_earlier_session_is_waited_for_in_the_next():
    def gather(ranks):
        ranks.begin(60.0)
        ranks.abandon("left: ValueError: the same on all ranks")
        ranks.begin(60.0)
        return ranks.all_gather_object(ranks.rank)

    outcomes, _ = on_threads(gather, 2)

    assert outcomes == [[0, 1]] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["raises before", "is interrupted within"])
def test_save_first_of_all_that_a_rank_does_not_come_to_is_an_error_on_the_other(tmp_path, how, deadline, fresh_python):
    """The other rank's process goes on, so nobody can see that it has ended."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [fresh_python, "-c", RANK, str(rank), str(server.port), str(tmp_path / "root"), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]

    output, _ = ranks[0].communicate(timeout=deadline(120))

    assert ranks[1].poll() is None
    ranks[1].communicate("the other has heard", timeout=deadline(60))
    expected = r"ended its program: ValueError: no data" if how == "raises before" else r"\w.*: KeyboardInterrupt"
    assert re.search(rf"RanksLostError: rank 1 of 2 {expected}\n$", output), output
    assert list_checkpoints(tmp_path / "root") == []


RANK = """
import atexit, os, sys
import torch
import torch.distributed as dist
atexit.register(sys.stdin.read)  # the last thing that the program does takes as long as the test wants
import nxd_ckpt

rank, port, root, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = dist.TCPStore("localhost", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 0:
    atexit.unregister(sys.stdin.read)
elif how == "raises before":
    raise ValueError("no data")
else:
    def interrupted(fd):
        raise KeyboardInterrupt
    os.fsync = interrupted
nxd_ckpt.save(root, "t", {f"own{rank}": torch.ones(4)}, timeout=3600)
"""


def _save_then_stop(rank, folder, results, stop_signal, timeout):
    """Both save and load once together; then rank 1 stops or kills itself in the midst of a save."""
    store = dist.TCPStore("localhost", int(folder.joinpath("port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    whole = torch.arange(8.0)
    save(folder / "root", "before", {"w": whole}, step=1)
    load(folder / "root", into={"w": torch.zeros(8)})
    write = os.write

    def stop_at_write(fd, content):
        os.kill(os.getpid(), stop_signal)
        return write(fd, content)

    if rank == 1:
        os.write = stop_at_write
    try:
        save(folder / "root", "after", {"w": whole, f"own{rank}": whole}, step=2, timeout=timeout)
    except CheckpointError as error:
        results.put((rank, str(error)))
    os._exit(0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stop_signal", "timeout", "message"),
    [
        (signal.SIGSTOP, 1.0, "no answer within 1 seconds from rank 1 of 2; it is stopped, gone, or needs longer"),
        (signal.SIGKILL, 3600.0, "rank 1 of 2 is gone: its process has ended"),
    ],
)
def test_save_with_a_stopped_or_killed_process_raises_on_the_other_and_names_it(
    tmp_path, stop_signal, timeout, message
):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    processes = [
        spawn.Process(target=_save_then_stop, args=(rank, tmp_path, results, stop_signal, timeout)) for rank in range(2)
    ]
    for process in processes:
        process.start()

    rank, error = results.get()

    processes[0].join()
    processes[1].kill()
    processes[1].join()
    assert rank == 0
    assert error.startswith(message)
    assert [info.tag for info in list_checkpoints(tmp_path / "root")] == ["before"]
    assert os.listdir(tmp_path / "root" / ".staging") == ["lock"]
