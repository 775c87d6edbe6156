"""A save in the background holds what one in the foreground would have held, whatever happens to the tensors next."""

import contextlib
import errno
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from nxd_ckpt import (
    AsyncSave,
    CheckpointError,
    Shard,
    ShardedTensor,
    async_save,
    end_async_saves,
    list_checkpoints,
    load,
    open_checkpoint,
    save,
)
from nxd_ckpt.asynchronous import saving
from nxd_ckpt.asynchronous.channel import Channel
from nxd_ckpt.asynchronous.slices import Slice
from nxd_ckpt.asynchronous.staging import SharedBuffer
from nxd_ckpt.errors import RanksLostError
from nxd_ckpt.manifest import ITEM_SIZES
from nxd_ckpt.saving import run_save
from nxd_ckpt.tensor_bytes import DTYPE_OF_CODE
from nxd_ckpt.testing import outcomes_on_threads, run_on_threads

from .processes import children_of, staging_buffers

pytestmark = pytest.mark.sample(13)  # each takes its time


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    end_async_saves()
    gc.collect()  # errors that a test caught hold the frames that hold a buffer
    assert staging_buffers() == {}


def state_of(rank, world_size):
    """All kinds of memory: shared and own, strided, conjugated, of no dimension, empty, of large and small elements."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 1200, generator=generator)
    columns = slice(rank * 1200 // world_size, (rank + 1) * 1200 // world_size)
    return {
        "columns": ShardedTensor(whole.shape, [Shard(whole[:, columns], (0, columns.start))]),
        "shared": torch.randn(50, 70, generator=generator, dtype=torch.float64).t(),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "flags": torch.randn(35, generator=generator) > 0,
        "phase": torch.randn(10, 7, generator=generator, dtype=torch.complex64).conj(),
        "small": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def zero(state):
    for value in state.values():
        for shard in value.shards if isinstance(value, ShardedTensor) else [Shard(value, ())]:
            shard.tensor.zero_()


def stored(root, tag):
    """Bytes of the data files, and the manifest without what differs between any two saves."""
    manifest = json.loads((root / tag / "manifest.json").read_text())
    text = json.dumps(manifest["tensors"]).replace(manifest["save_id"], "")
    files = [path.read_bytes() for path in sorted((root / tag / "data").iterdir())]
    return files, text, manifest["objects"], manifest["rank_objects"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("memory_limit", [None, 2**16], ids=["at once", "in slices"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_async_save_of_tensors_that_change_at_once_equals_save(tmp_path, world_size, memory_limit):
    def both(ranks):
        state, objects = state_of(ranks.rank, world_size), {"lr": [1.0]}
        options = {"objects": objects, "rank_objects": objects, "process_group": ranks}
        save(tmp_path, "sync", state, **options)
        handle = async_save(tmp_path, "async", state, memory_limit=memory_limit, **options)
        assert handle.staged
        zero(state)
        objects["lr"][0] = 0.0
        handle.wait(60)
        assert handle.committed
        assert handle.done()

    run_on_threads(both, world_size)

    assert stored(tmp_path, "async") == stored(tmp_path, "sync")
    assert len(list((tmp_path / "async" / "data").iterdir())) == world_size


def test_async_save_over_its_memory_limit_takes_no_more_memory_than_that(tmp_path):
    end_async_saves()
    whole = torch.arange(300_000, dtype=torch.float64).reshape(100, 3000)

    async_save(tmp_path, "t", {"w": whole, "columns": whole[:, ::2]}, memory_limit=2**17).wait(60)

    assert 0 < sum(staging_buffers().values()) <= 2**17
    assert torch.equal(open_checkpoint(tmp_path, "t").read("w"), whole)
    assert torch.equal(open_checkpoint(tmp_path, "t").read("columns"), whole[:, ::2])


def test_async_save_uses_the_memory_of_the_one_before(tmp_path):
    end_async_saves()
    state = {"w": torch.ones(10_000)}
    async_save(tmp_path, "a", state).wait(60)
    first = staging_buffers()

    async_save(tmp_path, "b", state).wait(60)

    assert staging_buffers() == first
    assert len(first) == 1


@pytest.mark.parametrize("root", ["folder", "memory://grows"])
def test_async_save_of_more_than_before_grows_the_memory_before_anybody_looks_at_it(tmp_path, monkeypatch, root):
    root = tmp_path if root == "folder" else root
    async_save(root, "a", {"w": torch.ones(10_000)}, overwrite=True).wait(60)
    larger, reserve = torch.randn(1_000_000), SharedBuffer.reserve

    def reserve_late(buffer, num_bytes):
        threading.Event().wait(0.3)  # time for the others to go ahead, if they would
        reserve(buffer, num_bytes)

    monkeypatch.setattr(SharedBuffer, "reserve", reserve_late)
    async_save(root, "b", {"w": larger}, overwrite=True).wait(60)

    assert torch.equal(open_checkpoint(root, "b").read("w"), larger)


def test_async_save_that_gets_no_memory_fails_and_the_next_is_well(tmp_path, monkeypatch):
    def reserve(buffer, num_bytes):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(SharedBuffer, "reserve", reserve)
        handle = async_save(tmp_path, "a", {"w": torch.ones(10)})
    with pytest.raises(CheckpointError, match=r"taking 64 bytes of memory: .* Cannot allocate memory"):
        handle.wait(60)

    async_save(tmp_path, "b", {"w": torch.ones(10)}).wait(60)
    assert [info.tag for info in list_checkpoints(tmp_path)] == ["b"]


def test_async_saves_in_a_row_are_committed_in_their_order(tmp_path):
    def three(ranks):
        w = torch.zeros(40_000)
        handles = []
        for step in range(3):
            handles.append(async_save(tmp_path, f"t{step}", {"w": w.fill_(step)}, process_group=ranks))
        handles[-1].wait(60)
        assert [handle.committed for handle in handles] == [True, True, True]

    run_on_threads(three, 2)

    by_time = sorted(list_checkpoints(tmp_path), key=lambda info: info.committed_at)
    assert [info.tag for info in by_time] == ["t0", "t1", "t2"]
    for step in range(3):
        assert open_checkpoint(tmp_path, f"t{step}").read("w").unique().tolist() == [step]


def listening_ports():
    """The TCP ports at which this process listens."""
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            sockets.add(os.readlink(f"/proc/self/fd/{name}"))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_machine_talk_about_a_background_save_without_a_port_that_others_reach():
    before = listening_ports()

    def talk(ranks):
        channel = Channel(ranks, "save", 60.0)
        heard = [channel.all_gather_object([ranks.rank, i]) for i in range(3)]
        ports = listening_ports()
        channel.leave()
        return heard, ports

    assert run_on_threads(talk, 2) == [([[[0, i], [1, i]] for i in range(3)], before)] * 2


def test_save_waits_for_async_saves_under_way(tmp_path):
    def both(ranks):
        async_save(tmp_path, "a", {"w": torch.ones(40_000)}, process_group=ranks)
        save(tmp_path, "b", {"w": torch.ones(3)}, process_group=ranks)

    run_on_threads(both, 2)

    assert {info.tag for info in list_checkpoints(tmp_path)} == {"a", "b"}


def test_async_save_by_one_rank_with_nothing_of_its_own_is_fine(tmp_path):
    def first_has_all(ranks):
        state = {"w": torch.ones(3)} if ranks.rank == 0 else {}
        async_save(tmp_path, "t", state, extra={"note.txt": b"hello"}, process_group=ranks).wait(60)

    run_on_threads(first_has_all, 2)

    assert open_checkpoint(tmp_path, "t").read("w").tolist() == [1, 1, 1]


def test_async_save_to_a_store_in_this_process_equals_save():
    whole = torch.randn(100, 30)

    async_save("memory://async", "t", {"w": whole, "t": whole.t()}, memory_limit=2**16).wait(60)

    into = {"w": torch.zeros(100, 30), "t": torch.zeros(30, 100)}
    load("memory://async", "t", into=into)
    assert torch.equal(into["w"], whole)
    assert torch.equal(into["t"], whole.t())


def failed_in_background(root, ranks):
    """Tries to save over a folder that is not a checkpoint."""
    (root / "taken").mkdir(exist_ok=True)
    handle = async_save(root, "taken", {"w": torch.ones(10)}, process_group=ranks)
    handle.wait_until_done()
    return handle


@pytest.mark.parametrize("call", [save, async_save])
@pytest.mark.parametrize("damaged", [False, True])
def test_save_under_a_taken_tag_is_refused_in_the_call_on_all_ranks(tmp_path, call, damaged):
    save(tmp_path, "taken", {"w": torch.ones(1)})
    if damaged:
        (tmp_path / "taken" / "manifest.json").write_text("damaged")

    def refused(ranks):
        with pytest.raises(CheckpointError, match="taken exists; choose another tag or pass overwrite=True"):
            call(tmp_path, "taken", {"w": torch.ones(10)}, process_group=ranks)
        async_save(tmp_path, "next", {"w": torch.ones(1)}, process_group=ranks).wait()  # nothing is left to report
        async_save(tmp_path, "taken", {"w": torch.ones(10)}, overwrite=True, process_group=ranks).wait()

    run_on_threads(refused, 2)

    assert open_checkpoint(tmp_path, "taken").read("w").numel() == 10


def test_async_save_failure_is_raised_by_wait_on_all_ranks_and_not_again(tmp_path):
    def fail(ranks):
        handle = failed_in_background(tmp_path, ranks)
        with pytest.raises(CheckpointError) as error:
            handle.wait()
        assert (handle.done(), handle.committed) == (True, False)
        save(tmp_path, "next", {"w": torch.ones(1)}, process_group=ranks)
        return str(error.value)

    texts = run_on_threads(fail, 2)

    assert texts[0] == texts[1]
    assert texts[0].startswith("saving checkpoint 'taken' to ")
    assert "rank 0: " in texts[0]
    assert "exists and is not a checkpoint" in texts[0]


@pytest.mark.parametrize("next_save", [save, async_save])
def test_async_save_failure_that_nobody_waited_for_is_raised_by_the_next_save_once(tmp_path, next_save):
    def fail(ranks):
        handle = failed_in_background(tmp_path, ranks)
        if ranks.rank == 1:
            with pytest.raises(CheckpointError):
                handle.wait()
        with pytest.raises(CheckpointError) as error:
            next_save(tmp_path, "b", {"w": torch.ones(1)}, process_group=ranks)
        assert list_checkpoints(tmp_path) == []
        async_save(tmp_path, "c", {"w": torch.ones(1)}, process_group=ranks).wait(60)
        return str(error.value)

    texts = run_on_threads(fail, 2)

    assert texts[0] == texts[1]
    assert texts[0].startswith("saving checkpoint 'taken' in the background has failed: ")
    assert texts[0].endswith("this save was not started")


def test_async_save_that_lost_ranks_is_told_from_one_that_could_not_write(tmp_path, monkeypatch):
    def lose_ranks(*arguments):
        raise RanksLostError("rank 1 of 2 is gone")

    monkeypatch.setattr(saving, "run_save", lose_ranks)

    with pytest.raises(RanksLostError, match="rank 1 of 2 is gone"):
        async_save(tmp_path, "t", {"w": torch.ones(1)}).wait()


def test_async_save_without_memory_for_the_copy_fails_on_all_ranks_and_the_next_is_well(tmp_path, monkeypatch):
    """Rank 1 runs out of memory with a part of its file on its way already."""

    def stage_one_slice(tensors, memory, slot_bytes, queue):
        start = queue.wait_for_slot() * slot_bytes
        queue.put(Slice(start, 64))
        raise MemoryError("no more")

    def fail(ranks):
        state = {f"own{ranks.rank}": torch.ones(1000)}
        async_save(tmp_path, "a", state, process_group=ranks).wait(60)
        if ranks.rank == 1:
            monkeypatch.setattr(saving, "stage", stage_one_slice)
        ranks.all_gather_object(None)
        handle = async_save(tmp_path, "b", state if ranks.rank == 1 else {}, process_group=ranks)
        with pytest.raises(CheckpointError) as error:
            handle.wait(60)
        monkeypatch.undo()
        ranks.all_gather_object(None)
        async_save(tmp_path, "c", state, process_group=ranks).wait(60)
        return str(error.value)

    texts = run_on_threads(fail, 2)

    assert texts[0] == texts[1]
    assert "rank 1: copying tensors to memory: MemoryError: no more" in texts[0]
    assert {info.tag for info in list_checkpoints(tmp_path)} == {"a", "c"}
    assert open_checkpoint(tmp_path, "c").read("own1").tolist() == [1.0] * 1000


def test_async_save_wrong_arguments_are_raised_by_the_call_on_all_ranks(tmp_path):
    def different_tags(ranks):
        async_save(tmp_path, f"t{ranks.rank}", {"w": torch.ones(1)}, process_group=ranks)

    outcomes = outcomes_on_threads(different_tags, 2)

    assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError]
    with pytest.raises(ValueError, match="memory_limit=5 bytes is too small; pass at least 65536"):
        async_save(tmp_path, "t", {"w": torch.ones(1)}, memory_limit=5)
    assert list_checkpoints(tmp_path) == []


def test_async_save_leaves_a_handler_of_sigterm_alone(tmp_path):
    def own(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        async_save(tmp_path, "t", {"w": torch.ones(1)}).wait(60)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sizes_of_elements_are_those_of_torch():
    assert {code: dtype.itemsize for code, dtype in DTYPE_OF_CODE.items()} == ITEM_SIZES


def test_writer_process_has_no_torch(tmp_path):
    end_async_saves()
    others = set(children_of(os.getpid()))

    async_save(tmp_path, "t", {"w": torch.ones(1)}).wait(60)

    (writer,) = set(children_of(os.getpid())) - others
    assert "libtorch" not in Path(f"/proc/{writer}/maps").read_text()


def test_save_by_other_ranks_waits_for_what_is_under_way(tmp_path, monkeypatch):
    """Of this process: a save of two ranks in the background, then one of this process alone into the same folder."""
    is_waited_for = threading.Event()
    wait = AsyncSave.wait_until_done
    monkeypatch.setattr(AsyncSave, "wait_until_done", lambda save: (is_waited_for.set(), wait(save)))
    monkeypatch.setattr(saving, "run_save", lambda *args: (is_waited_for.wait(60.0), run_save(*args)))
    handles = run_on_threads(
        lambda ranks: async_save(tmp_path, "both", state_of(ranks.rank, 2), process_group=ranks), 2
    )

    save(tmp_path, "alone", {"w": torch.ones(1)})

    assert all(handle.committed for handle in handles)
    assert {info.tag for info in list_checkpoints(tmp_path)} == {"both", "alone"}


@pytest.mark.parametrize("closed", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_save_with_closed_standard_streams_writes_what_was_given_though_libraries_print(tmp_path, closed):
    kept = [(number, os.dup(number)) for number in closed]
    end_async_saves()
    for number in closed:
        os.close(number)
    try:
        handle = async_save(tmp_path, "a", {"w": torch.arange(1000.0)})
        for number in closed:
            os.write(number, b"what a library prints" * 10)
        handle.wait()
        end_async_saves()
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)

    assert torch.equal(open_checkpoint(tmp_path, "a").read("w"), torch.arange(1000.0))
