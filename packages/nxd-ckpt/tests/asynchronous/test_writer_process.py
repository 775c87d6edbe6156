"""Writers that fail, die or stop, and parents that die: all ranks hear of it, and the folder holds old or new."""

import errno
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading

import pytest
import torch
from nxd_ckpt import CheckpointError, async_save, end_async_saves, list_checkpoints, open_checkpoint
from nxd_ckpt.asynchronous.slices import Slice
from nxd_ckpt.asynchronous.writer_process import EndOfFile, FileToWrite, WritingFailed, main

from ..crash.forked_ranks import run_forked
from .processes import children_of, ends_within, open_files, staging_buffers, wait_until_written, writer_of

pytestmark = pytest.mark.sample(4)  # each takes its time

WORLD_SIZE = 2
SLICED = {"memory_limit": 2**16}


def state_of(rank, value, size=1000):
    return {f"own{rank}": torch.full((size,), float(value)), "shared": torch.full((10,), float(value))}


def save_value(root, tag, ranks, value, size=1000, **options):
    return async_save(
        root, tag, state_of(ranks.rank, value, size), objects=value, process_group=ranks, overwrite=True, **options
    )


def value_of(root, tag):
    checkpoint = open_checkpoint(root, tag)
    for name in checkpoint.tensors:
        assert checkpoint.read(name).unique().tolist() == [checkpoint.objects]
    return checkpoint.objects


def values_by_rank(outcomes):
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def let_it_fail(break_writer):
    """A save, one that fails because of what is done to rank 1's writer first, and one that is well again.

    Returns:
        What a rank does; its value is the text of the failure.
    """

    def run(root, ranks, **options):
        save_value(root, "t", ranks, 1).wait(60)
        if ranks.rank == 1:
            break_writer(root, writer_of())
        failing = save_value(root, "t", ranks, 2, size=2_000_000, **options)
        with pytest.raises(CheckpointError) as error:
            failing.wait(60)
        assert value_of(root, "t") == 1
        assert ranks.rank > 0 or os.listdir(root / ".staging") == ["lock"]
        save_value(root, "t", ranks, 3).wait(60)
        end_async_saves()
        return str(error.value)

    return run


def forbid_large_files(root, writer):
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (100_000, 100_000))


def kill(root, writer):
    os.kill(writer, signal.SIGKILL)


def kill_while_writing(root, writer):
    def watch_and_kill():
        wait_until_written(root, 1)
        os.kill(writer, signal.SIGKILL)

    threading.Thread(target=watch_and_kill).start()


@pytest.mark.parametrize(
    ("break_writer", "options", "expected"),
    [
        (forbid_large_files, {}, "OSError: [Errno 27] File too large"),
        (forbid_large_files, SLICED, "OSError: [Errno 27] File too large"),
        (kill_while_writing, SLICED, "was killed by signal 9"),
    ],
    ids=["disk error", "disk error with slices", "killed while writing"],
)
def test_writer_that_fails_on_one_rank_is_raised_by_all_and_replaced(tmp_path, break_writer, options, expected):
    fail = let_it_fail(break_writer)

    texts = values_by_rank(run_forked(lambda ranks: fail(tmp_path, ranks, **options), WORLD_SIZE))

    assert texts[0] == texts[1]
    assert texts[0].startswith(f"saving checkpoint 't' to {tmp_path} failed on 1 of 2 ranks\n  rank 1: ")
    assert expected in texts[0]
    assert value_of(tmp_path, "t") == 3


class NoRoom:
    """A transaction whose storage is full."""

    def write_file(self, file, parts, num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_writer_that_failed_says_nothing_to_the_rest_of_the_file(tmp_path, monkeypatch, capfd, deadline):
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(sys, "argv", ["writer", str(os.memfd_create("buffer")), str(theirs.fileno()), str(os.getpid())])
    writer = multiprocessing.get_context("fork").Process(target=main)
    writer.start()
    theirs.close()
    request = FileToWrite(NoRoom(), "a.safetensors", b"header", [8])

    for message in (request, Slice(0, 8), EndOfFile(), request):
        ours.send(message)

    failures = [ours.recv() if ours.poll(deadline(30)) else None for _ in range(2)]
    writer.kill()
    writer.join()
    ours.close()
    os.close(int(sys.argv[1]))
    assert failures == [WritingFailed("OSError: [Errno 28] No space left on device")] * 2
    assert "Traceback" not in capfd.readouterr().err


def test_writer_that_was_killed_between_saves_is_replaced(tmp_path):
    def run(ranks):
        save_value(tmp_path, "t", ranks, 1).wait(60)
        first = writer_of()
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        save_value(tmp_path, "t", ranks, 2).wait(60)
        assert writer_of() != first
        end_async_saves()

    values_by_rank(run_forked(run, WORLD_SIZE))

    assert value_of(tmp_path, "t") == 2


def test_writer_that_is_stopped_is_ended_and_raised_by_all_within_the_timeout(tmp_path):
    def run(ranks):
        save_value(tmp_path, "t", ranks, 1).wait(60)
        stopped = writer_of() if ranks.rank == 1 else None
        if stopped is not None:
            os.kill(stopped, signal.SIGSTOP)
        failing = save_value(tmp_path, "t", ranks, 2, timeout=1.0)
        with pytest.raises(TimeoutError, match=r"takes longer than 0\.01 seconds; it continues"):
            failing.wait(0.01)
        with pytest.raises(CheckpointError) as error:
            failing.wait(30)
        end_async_saves()
        assert stopped is None or ends_within(stopped, 10)
        return str(error.value)

    texts = values_by_rank(run_forked(run, WORLD_SIZE))

    assert texts[0] == texts[1]
    assert "from rank 1 of 2" in texts[0] or "rank 1: its writer process" in texts[0]
    assert value_of(tmp_path, "t") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_parent_killed_while_its_writer_writes_leaves_the_old_one_and_no_process(tmp_path, rank):
    root = tmp_path / "root"

    def run(ranks):
        save_value(root, "t", ranks, 1).wait(60)
        if ranks.rank == rank:
            (tmp_path / "writer").write_text(str(writer_of()))

            def watch_and_die():
                wait_until_written(root, rank)
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=watch_and_die).start()
        failing = save_value(root, "t", ranks, 2, size=4_000_000, timeout=3.0, **SLICED)
        with pytest.raises(CheckpointError) as error:
            failing.wait(60)
        return str(error.value)

    outcomes = run_forked(run, WORLD_SIZE)

    assert outcomes[rank].signal == signal.SIGKILL
    text = outcomes[1 - rank].value
    assert f"rank {rank} of 2" in text or "lost contact with the other ranks" in text or "got no response" in text
    assert ends_within(int((tmp_path / "writer").read_text()), 10)
    assert value_of(root, "t") == 1
    values_by_rank(run_forked(lambda ranks: save_value(root, "t", ranks, 3).wait(60), WORLD_SIZE))
    assert value_of(root, "t") == 3
    assert os.listdir(root / ".staging") == ["lock"]


def test_writer_that_is_stopped_ends_with_its_parent(tmp_path):
    def run(ranks):
        save_value(tmp_path / "root", "t", ranks, 1).wait(60)
        (tmp_path / "writer").write_text(str(writer_of()))
        os.kill(writer_of(), signal.SIGSTOP)
        os.waitid(os.P_PID, writer_of(), os.WSTOPPED | os.WNOWAIT)
        os.kill(os.getpid(), signal.SIGKILL)

    (outcome,) = run_forked(run, 1)

    assert outcome.signal == signal.SIGKILL
    assert ends_within(int((tmp_path / "writer").read_text()), 10)


def test_writer_outlives_the_thread_that_started_it(tmp_path):
    def run(ranks):
        thread = threading.Thread(target=lambda: save_value(tmp_path, "t", ranks, 1).wait(60))
        thread.start()
        thread.join()
        first = writer_of()
        save_value(tmp_path, "t", ranks, 2).wait(60)
        assert writer_of() == first
        end_async_saves()

    values_by_rank(run_forked(run, 1))

    assert value_of(tmp_path, "t") == 2


def test_end_async_saves_leaves_no_process_memory_or_file_behind(tmp_path):
    def run(ranks):
        save_value(tmp_path, "warm", ranks, 0).wait(60)
        end_async_saves()
        gc.collect()
        before = open_files()
        for value in range(3):
            handle = save_value(tmp_path, f"t{value}", ranks, value)
        assert len(children_of(os.getpid())) == 1
        end_async_saves()
        assert handle.committed
        gc.collect()
        assert children_of(os.getpid()) == []
        assert staging_buffers() == {}
        return before, open_files(), os.listdir("/dev/shm")

    shared_memory = os.listdir("/dev/shm")
    for before, after, shared_memory_then in values_by_rank(run_forked(run, WORLD_SIZE)):
        assert after == before
        assert not [name for name in set(shared_memory_then) - set(shared_memory) if "nxd" in name]


def test_end_async_saves_waits_for_those_under_way(tmp_path):
    async_save(tmp_path, "t", {"w": torch.ones(100_000)})

    end_async_saves()

    assert [info.tag for info in list_checkpoints(tmp_path)] == ["t"]
