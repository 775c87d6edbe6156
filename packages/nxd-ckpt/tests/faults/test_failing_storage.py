"""Storage that fails in ways of its own: network file systems, other devices, object stores, and an interrupt."""

import errno
import os
import uuid
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from nxd_ckpt import CheckpointError, list_checkpoints, load, open_checkpoint, retain, save

OLD = {"w": torch.zeros(1000)}
NEW = {"w": torch.ones(1000)}


@pytest.mark.pairs
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EXDEV])
@pytest.mark.parametrize("call", ["rename", "replace", "fsync", "write", "mkdir"])
def test_save_that_storage_refuses_is_one_line_and_leaves_the_old_checkpoint(
    tmp_path, monkeypatch, call, code, overwrite
):
    save(tmp_path, "old", OLD, step=1)
    original = getattr(os, call)
    failed = []

    def fail(*args, **options):
        failed.append(call)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    try:
        save(tmp_path, "old" if overwrite else "new", NEW, step=2, overwrite=overwrite)
        expected, problem = NEW, os.strerror(code)  # where the call is not needed, as for the hint LATEST
    except CheckpointError as error:
        expected, problem = OLD, str(error)
    monkeypatch.setattr(os, call, original)

    assert failed
    assert os.strerror(code) in problem
    assert "\n" not in problem
    assert torch.equal(open_checkpoint(tmp_path).read("w"), expected["w"])
    save(tmp_path, "next", NEW, step=3)
    assert torch.equal(open_checkpoint(tmp_path).read("w"), NEW["w"])


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("call", ["open", "preadv", "fstat"])
def test_load_that_storage_refuses_is_one_line(tmp_path, monkeypatch, call, code):
    save(tmp_path, "t", NEW)
    original = getattr(os, call)

    def fail(*args, **options):
        if call == "open" and not str(args[0]).endswith("safetensors"):
            return original(*args, **options)
        raise OSError(code, os.strerror(code))

    def load_with_failures():
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            load(tmp_path, "t", into={"w": torch.zeros(1000)})

    with pytest.raises(CheckpointError, match=os.strerror(code)) as raised:
        load_with_failures()

    assert "\n" not in str(raised.value)


class FailingObjects(MemoryFileSystem):
    """Objects in memory whose next calls fail as a test says: `failures` maps a method to what it does instead."""

    protocol = "failing"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    failures: ClassVar[dict] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("failing://", "memory://"))

    def cat_ranges(self, *args, **options):
        change = self.failures.get("cat_ranges", lambda found: found)
        return change(super().cat_ranges(*args, **options))

    def pipe_file(self, path, *args, **options):
        self.failures.get("pipe_file", lambda found: found)(path)
        return super().pipe_file(path, *args, **options)


@pytest.fixture
def objects(monkeypatch):
    """The URL of an empty object store, and what is to fail in it."""
    fsspec.register_implementation("failing", FailingObjects, clobber=True)
    monkeypatch.setattr(FailingObjects, "failures", {})
    return f"failing://{uuid.uuid4().hex}", FailingObjects.failures


class SlowDown(Exception):
    """As an object store's client raises it, which is no OSError."""


def throttled(_):
    raise SlowDown("reduce your request rate")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (throttled, "SlowDown: reduce your request rate"),
        (lambda found: [SlowDown("reduce your request rate")], "SlowDown: reduce your request rate"),
        (lambda found: [part[:-1] for part in found], "the file ends at byte"),
        (lambda found: [b"" for _ in found], "the file ends at byte"),
        (lambda found: [bytes(len(part)) for part in found], "do not match their checksum"),
        (lambda found: [part[1:] + part[:1] for part in found], "do not match their checksum"),
    ],
    ids=["throttled", "throttled in part", "a byte short", "nothing", "zeros", "shifted"],
)
def test_load_from_objects_that_come_wrong_is_one_line(objects, change, message):
    root, failures = objects
    save(root, "t", NEW)
    failures["cat_ranges"] = change

    with pytest.raises(CheckpointError, match=message) as raised:
        load(root, "t", into={"w": torch.zeros(1000)})

    assert "\n" not in str(raised.value)


def test_save_to_objects_that_throttle_the_commit_leaves_the_old_checkpoint(objects):
    root, failures = objects
    save(root, "old", OLD, step=1)
    failures["pipe_file"] = throttled

    with pytest.raises(CheckpointError, match="SlowDown: reduce your request rate"):
        save(root, "new", NEW, step=2)

    assert [info.tag for info in list_checkpoints(root)] == ["old"]
    failures.clear()
    save(root, "new", NEW, step=2)
    assert torch.equal(open_checkpoint(root).read("w"), NEW["w"])


def test_load_whose_checkpoint_retention_removes_meanwhile_is_one_line(tmp_path, monkeypatch):
    save(tmp_path, "old", OLD, step=1)
    save(tmp_path, "new", NEW, step=2)
    checkpoint = open_checkpoint(tmp_path, "old")

    assert retain(tmp_path, keep_last=1) == ["old"]

    with pytest.raises(CheckpointError, match=r"data file .*old.* is missing"):
        checkpoint.read("w")


def test_newest_checkpoint_is_found_though_retention_removes_an_older_one_meanwhile(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", NEW, step=step)
    original = os.open

    def remove_then_open(path, *args, **options):
        if str(path) == str(tmp_path / "step-1"):
            monkeypatch.setattr(os, "open", original)
            retain(tmp_path, keep_last=1)
        return original(path, *args, **options)

    monkeypatch.setattr(os, "open", remove_then_open)

    assert open_checkpoint(tmp_path).step == 3


def test_save_interrupted_twice_leaves_the_old_checkpoint_and_the_next_save_is_well(tmp_path, monkeypatch):
    """As by Ctrl-C while it writes, and again while it clears up."""
    save(tmp_path, "old", OLD, step=1)

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        patch.setattr(os, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, "new", NEW, step=2)

    assert [info.tag for info in list_checkpoints(tmp_path)] == ["old"]
    save(tmp_path, "new", NEW, step=2)
    assert torch.equal(open_checkpoint(tmp_path).read("w"), NEW["w"])
    assert os.listdir(tmp_path / ".staging") == ["lock"]
