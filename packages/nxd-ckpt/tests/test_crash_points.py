"""A save that dies or fails at any file operation leaves the old checkpoint or the new one, never a mix.

Every system call by which a save changes the disk is counted; then the save is repeated once per call and ended there,
before the call or halfway through a write. After a crash no later call of that rank gets through either.
"""

import errno
import os
import threading

import pytest
import torch
from nxd_ckpt import CheckpointError, list_checkpoints, load, open_checkpoint, save
from nxd_ckpt.testing import Killed, outcomes_on_threads, run_on_threads

CHANGING_CALLS = ["mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir"]
WORLD_SIZE = 2


class Saboteur:
    """Counts the changing calls of one thread and makes the one of number `fatal` the last, or fail."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._fatal = None
        self._thread = ""
        self._error = None
        self._halfway = False
        for name in CHANGING_CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def arm(self, fatal, *, thread="", error=None, halfway=False):
        """With `error` the call fails once; without, the thread is dead from it on. `thread` "" is any."""
        self.calls, self._fatal = [], fatal
        self._thread, self._error, self._halfway = thread, error, halfway

    def disarm(self):
        self.arm(None)

    def _wrap(self, name, original):
        def call(*args, **kwargs):
            if threading.current_thread().name != (self._thread or threading.current_thread().name):
                return original(*args, **kwargs)
            number = len(self.calls)
            self.calls.append(name)
            if self._fatal is not None and number == self._fatal and self._error is not None:
                raise OSError(self._error, os.strerror(self._error))
            if self._fatal is not None and number >= self._fatal and self._error is None:
                if self._halfway and number == self._fatal and name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                raise Killed(f"at call {number}, {name}")
            return original(*args, **kwargs)

        return call


@pytest.fixture
def saboteur(monkeypatch):
    return Saboteur(monkeypatch)


def state_of(rank, value):
    return {"shared": torch.full((100,), float(value)), f"own{rank}": torch.full((50,), float(value))}


def save_all(root, tag, value, **options):
    def save_one(ranks):
        save(root, tag, state_of(ranks.rank, value), step=value, objects=value, process_group=ranks, **options)

    return outcomes_on_threads(save_one, WORLD_SIZE)


def value_of(root, tag):
    """The value that a checkpoint was saved with, after reading all of it."""
    checkpoint = open_checkpoint(root, tag)
    for name in checkpoint.tensors:
        assert checkpoint.read(name).unique().tolist() == [checkpoint.objects]
    assert checkpoint.step == checkpoint.objects
    return checkpoint.objects


def points_of_save(saboteur, root, thread, **options):
    """How many changing calls the thread makes in one save that goes well."""
    save_all(root, "t", 1)
    saboteur.arm(None, thread=thread)
    save_all(root, options.pop("tag", "t"), 2, **options)
    number = len(saboteur.calls)
    saboteur.disarm()
    return number


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("halfway", [False, True], ids=["before the call", "halfway through a write"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new tag", "overwrite"])
def test_save_killed_at_any_call_leaves_old_or_new(tmp_path, saboteur, rank, halfway, overwrite):
    tag = "t" if overwrite else "u"
    thread = f"rank {rank}"
    points = points_of_save(saboteur, tmp_path / "count", thread, tag=tag, overwrite=overwrite)
    assert points >= (2 if rank else 10)

    for point in range(points):
        root = tmp_path / str(point)
        save_all(root, "t", 1)

        saboteur.arm(point, thread=thread, halfway=halfway)
        outcomes = save_all(root, tag, 2, overwrite=overwrite)
        saboteur.disarm()

        assert isinstance(outcomes[rank], Killed)
        if outcomes[1 - rank] is None:  # killed while tidying up, after all ranks knew of the commit
            assert value_of(root, tag) == 2
        else:
            assert "lost contact with the other ranks" in str(outcomes[1 - rank])
        tags = [info.tag for info in list_checkpoints(root)]
        assert tags in ([["t"]] if overwrite else [["t"], ["t", "u"]])
        assert value_of(root, "t") in ({1, 2} if overwrite else {1})
        assert value_of(root, tags[-1]) in {1, 2}
        assert save_all(root, tag, 3, overwrite=True) == [None, None]
        assert value_of(root, tag) == 3
        assert os.listdir(root / ".staging") == ["lock"]
        assert len(list((root / tag / "data").iterdir())) == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new tag", "overwrite"])
def test_save_failing_at_any_call_raises_the_same_on_all_ranks_and_leaves_old_or_new(
    tmp_path, saboteur, rank, overwrite
):
    tag = "t" if overwrite else "u"
    thread = f"rank {rank}"
    points = points_of_save(saboteur, tmp_path / "count", thread, tag=tag, overwrite=overwrite)

    for point in range(points):
        root = tmp_path / str(point)
        save_all(root, "t", 1)

        saboteur.arm(point, thread=thread, error=errno.EIO)
        outcomes = save_all(root, tag, 2, overwrite=overwrite)
        at_fault = saboteur.calls[point]
        saboteur.disarm()

        if outcomes == [None, None]:  # only the tidying up after the commit may fail without a word
            assert at_fault in {"unlink", "rmdir"}
            assert value_of(root, tag) == 2
        else:
            assert str(outcomes[0]) == str(outcomes[1])
            assert f"failed on 1 of 2 ranks\n  rank {rank}: OSError: [Errno 5] Input/output error" in str(outcomes[0])
            assert value_of(root, "t") in ({1, 2} if overwrite else {1})
            assert os.listdir(root / ".staging") == ["lock"]
        assert save_all(root, tag, 3, overwrite=True) == [None, None]
        assert value_of(root, tag) == 3


def test_save_makes_everything_durable_in_the_right_order(tmp_path, monkeypatch):
    """Each file and folder is fsynced before the rename that makes it visible, the parent after it."""
    events = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(fd):
        events.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def recording_rename(source, target):
        events.append((source, target))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    root = tmp_path / "root"

    save(root, "t", {"w": torch.ones(3)})

    save_id = open_checkpoint(root).save_id
    staged = f"{root}/.staging/{save_id}"
    assert events == [
        f"{tmp_path}",
        f"{root}",
        f"{staged}/data/{save_id}-00000-0.safetensors",
        f"{staged}/manifest.json",
        f"{staged}/data",
        f"{staged}",
        (staged, f"{root}/t"),
        f"{root}",
    ]


def test_overwrite_makes_new_data_durable_before_the_manifest_is_replaced(tmp_path, monkeypatch):
    save(tmp_path, "t", {"w": torch.ones(3)})
    events = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths))[1])
    monkeypatch.setattr(os, "unlink", lambda *a, **k: (events.append("unlink"), unlink(*a, **k))[1])

    save(tmp_path, "t", {"w": torch.zeros(3)}, overwrite=True)

    place = events.index("replace")
    assert events[place - 1] == f"{tmp_path}/t/data"
    assert events[place + 1] == f"{tmp_path}/t"
    assert "unlink" not in events[:place]
    assert "unlink" in events[place + 2 :]


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
            with pytest.raises(CheckpointError, match="another save is at work in") as error:
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
    assert "path must lie on a file system that all ranks share" in str(outcomes[0])
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
