"""What goes wrong on one rank, or between two saves, is told to all ranks alike."""

import errno
import os
import threading

import pytest
import torch
from nxd_ckpt import CheckpointError, list_checkpoints, load, open_checkpoint, save
from nxd_ckpt.testing import Killed, outcomes_on_threads, run_on_threads

WORLD_SIZE = 2


def state_of(rank, value):
    return {"shared": torch.full((100,), float(value)), f"own{rank}": torch.full((50,), float(value))}


def save_all(root, tag, value, **options):
    def save_one(ranks):
        save(root, tag, state_of(ranks.rank, value), step=value, objects=value, process_group=ranks, **options)

    return outcomes_on_threads(save_one, WORLD_SIZE)


def value_of(root, tag):
    return open_checkpoint(root, tag).read("shared").unique().item()


def test_save_under_a_taken_tag_is_refused_and_the_old_one_stays(tmp_path):
    save_all(tmp_path, "t", 1)

    outcomes = save_all(tmp_path, "t", 2)

    assert str(outcomes[0]) == str(outcomes[1])
    assert str(outcomes[0]).endswith("t exists; choose another tag or pass overwrite=True")
    assert value_of(tmp_path, "t") == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_save_over_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path, overwrite):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.tex").write_text("five years")

    with pytest.raises(CheckpointError, match="exists and is not a checkpoint; move it or choose another tag"):
        save(tmp_path, "t", {"w": torch.ones(1)}, overwrite=overwrite)

    assert (tmp_path / "t" / "thesis.tex").read_text() == "five years"


def test_save_while_another_save_is_at_work_is_refused_and_leaves_that_alone(tmp_path, monkeypatch):
    inner = []
    write = os.write

    def write_and_save_too(fd, content):
        if not inner:
            inner.append(None)
            with pytest.raises(CheckpointError, match="another save is in progress in") as error:
                save(tmp_path, "second", {"w": torch.ones(1)})
            inner[0] = error.value
        return write(fd, content)

    monkeypatch.setattr(os, "write", write_and_save_too)

    save(tmp_path, "first", {"w": torch.ones(1)})

    assert isinstance(inner[0], CheckpointError)
    assert [info.tag for info in list_checkpoints(tmp_path)] == ["first"]


def test_save_to_a_folder_that_ranks_do_not_share_is_refused_with_a_hint(tmp_path):
    def save_one(ranks):
        save(tmp_path / str(ranks.rank), "t", state_of(ranks.rank, 1), process_group=ranks)

    outcomes = outcomes_on_threads(save_one, WORLD_SIZE)

    assert str(outcomes[0]).count("rank 1: ") == 1
    assert "path must be on a file system that all ranks share" in str(outcomes[0])
    assert list_checkpoints(tmp_path / "0") == []


def test_save_data_file_that_vanishes_before_the_commit_is_noticed(tmp_path, monkeypatch):
    close = os.close

    def close_and_lose(fd):
        name = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if name.endswith("-00001-0.safetensors"):
            os.truncate(name, 10)

    monkeypatch.setattr(os, "close", close_and_lose)

    outcomes = save_all(tmp_path, "t", 1)

    assert str(outcomes[0]) == str(outcomes[1])
    assert "-00001-0.safetensors has 10 bytes, expected" in str(outcomes[0])
    assert list_checkpoints(tmp_path) == []


def test_load_read_error_on_one_rank_is_raised_by_all(tmp_path, monkeypatch):
    save_all(tmp_path, "t", 1)
    preadv = os.preadv

    def failing_preadv(fd, buffers, offset):
        if threading.current_thread().name == "rank 1":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing_preadv)

    outcomes = outcomes_on_threads(
        lambda ranks: load(tmp_path, into={"shared": torch.zeros(100)}, strict=False, process_group=ranks), 2
    )

    assert str(outcomes[0]) == str(outcomes[1])
    assert "failed on 1 of 2 ranks\n  rank 1: data file " in str(outcomes[0])
    assert "cannot be read: [Errno 5] Input/output error" in str(outcomes[0])


@pytest.mark.parametrize(("failing", "last_line"), [(8, "  rank 7: own7 is a set"), (9, "  and 1 more rank")])
def test_save_that_fails_on_many_ranks_names_the_first_eight(tmp_path, failing, last_line):
    def save_one(ranks):
        value = {ranks.rank} if ranks.rank < failing else torch.ones(1)  # JSON cannot hold a set
        save(tmp_path, "t", {f"own{ranks.rank}": value}, process_group=ranks)

    outcomes = outcomes_on_threads(save_one, 10)

    first, *lines = str(outcomes[9]).splitlines()
    assert first.endswith(f"failed on {failing} of 10 ranks")
    assert len(lines) == failing
    assert lines[-1].startswith(last_line)


def test_load_rank_killed_while_reading_ends_the_others(tmp_path, monkeypatch):
    save_all(tmp_path, "t", 1)

    def killed_preadv(fd, buffers, offset):
        raise Killed

    monkeypatch.setattr(os, "preadv", killed_preadv)

    into = [{}, {"shared": torch.zeros(100)}]
    outcomes = outcomes_on_threads(
        lambda ranks: load(tmp_path, into=into[ranks.rank], strict=False, process_group=ranks), 2
    )

    assert isinstance(outcomes[1], Killed)
    with pytest.raises(CheckpointError, match="rank 0 of 2 lost contact"):
        raise outcomes[0]


def test_run_on_threads_rank_that_raises_is_raised():
    def fail(ranks):
        raise ValueError(f"no {ranks.rank}")

    with pytest.raises(ValueError, match="no 0"):
        run_on_threads(fail, 2)
