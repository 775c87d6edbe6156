import hashlib
import json
import os
import time
from contextlib import nullcontext

import pytest
import torch
from nxd_ckpt import CheckpointError, delete, gc, latest, list_checkpoints, load, open_checkpoint, retain, save
from nxd_ckpt.stores import manifests
from nxd_ckpt.stores.posix import PosixStore


def save_steps(root, *steps):
    for step in steps:
        save(root, f"step-{step}", {"w": torch.full((4,), float(step))}, step=step)


def tags(root):
    return [info.tag for info in list_checkpoints(root)]


def test_list_checkpoints_orders_by_step_whatever_the_file_times_say(tmp_path):
    save_steps(tmp_path, 10, 9, 100)
    for age, tag in enumerate(["step-100", "step-10", "step-9"]):
        for path in [tmp_path / tag, tmp_path / tag / "manifest.json"]:
            os.utime(path, (1e9 - age, 1e9 - age))

    assert tags(tmp_path) == ["step-9", "step-10", "step-100"]
    assert latest(tmp_path).tag == "step-100"
    assert open_checkpoint(tmp_path).step == 100


def test_list_checkpoints_same_or_no_step_orders_by_commit_time(tmp_path, monkeypatch):
    for clock, (tag, step) in enumerate([("b", 5), ("a", 5), ("late", None), ("d", 5), ("later", None)]):
        monkeypatch.setattr(time, "time", lambda clock=clock: 1000.0 + clock)
        save(tmp_path, tag, {}, step=step)

    assert tags(tmp_path) == ["late", "later", "b", "a", "d"]


@pytest.mark.parametrize("store", ["folder", "memory"])
@pytest.mark.parametrize("clock", [(2e9, 1e9, 1e9 - 1), (1e9, 1e9, 1e9), (9e18, 1e9, 1e9)], ids=str)
def test_commit_is_newer_than_all_before_it_whatever_the_clock_says(tmp_path, monkeypatch, store, clock):
    root = tmp_path if store == "folder" else f"memory://{tmp_path.name}"
    for tag, now in zip(["z", "b", "a"], clock, strict=True):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        save(root, tag, {"w": torch.ones(2)})

    assert tags(root) == ["z", "b", "a"]
    save(root, "z", {"w": torch.ones(2)}, overwrite=True)
    assert latest(root).tag == "z"
    assert retain(root, keep_last=1) == ["b", "a"]
    assert open_checkpoint(root).tag == "z"


def test_looking_through_a_folder_reads_whole_manifests_of_the_newest_and_the_removed_alone(tmp_path, monkeypatch):
    save_steps(tmp_path, *range(1, 9))
    read_whole = PosixStore.read_manifest
    read = []

    def noted(self, tag):
        read.append(tag)
        return read_whole(self, tag)

    monkeypatch.setattr(PosixStore, "read_manifest", noted)

    def read_by(call):
        read.clear()
        call()
        return set(read)

    assert read_by(lambda: latest(tmp_path)) == {"step-8"}
    assert read_by(lambda: list_checkpoints(tmp_path)) == {"step-8"}
    assert read_by(lambda: open_checkpoint(tmp_path)) == {"step-8"}
    assert read_by(lambda: save_steps(tmp_path, 9)) == set()
    assert read_by(lambda: delete(tmp_path, "step-9")) == set()
    assert read_by(lambda: gc(tmp_path)) == set()
    assert read_by(lambda: retain(tmp_path, keep_last=2, keep_every=2)) == {f"step-{n}" for n in (1, 3, 5, 7, 8)}


@pytest.mark.parametrize("kind", ["of an earlier version", "with a long first line"])
def test_manifests_whose_beginning_does_not_suffice_are_listed_alike(tmp_path, monkeypatch, kind):
    save_steps(tmp_path, 2, 1, 3)
    for tag in ("step-1", "step-3"):
        path = tmp_path / tag / "manifest.json"
        if kind == "of an earlier version":
            content = {**json.loads(path.read_bytes()), "digest": "0" * 64}
            for name in ("head_digest", "bytes_after_head", "metrics"):
                del content[name]
            text = json.dumps(content, separators=(",", ":")).encode()
            path.write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))
    if kind == "with a long first line":
        monkeypatch.setattr(manifests, "HEAD_BYTES", 300)

    assert tags(tmp_path) == ["step-1", "step-2", "step-3"]
    assert retain(tmp_path, keep_last=1) == ["step-1", "step-2"]
    assert open_checkpoint(tmp_path).read("w").tolist() == [3.0] * 4


def test_list_checkpoints_tells_what_the_manifest_says(tmp_path):
    save(tmp_path, "a", {"w": torch.ones(4)}, step=3)

    (info,) = list_checkpoints(tmp_path)

    (file,) = (tmp_path / "a" / "data").iterdir()
    assert (info.tag, info.step, info.world_size) == ("a", 3, 1)
    assert info.num_bytes == file.stat().st_size
    assert info.save_id == open_checkpoint(tmp_path, "a").save_id
    assert 0 <= time.time() - info.committed_at < 3600


def test_list_checkpoints_of_an_absent_folder_is_empty(tmp_path):
    assert list_checkpoints(tmp_path / "absent") == []
    assert latest(tmp_path / "absent") is None


def test_list_checkpoints_skips_what_is_not_a_whole_checkpoint(tmp_path):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "log.txt").write_text("x")
    (tmp_path / "no-manifest" / "data").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "manifest.json").write_text("{}")
    damaged = tmp_path / "step-2" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])

    with pytest.warns(UserWarning, match=r"skipping .*step-2/manifest.json is damaged"):
        found = tags(tmp_path)

    assert found == ["step-1"]


def test_load_without_tag_takes_the_newest_complete_one(tmp_path):
    save_steps(tmp_path, 2, 1)
    wanted = torch.zeros(4)

    loaded = load(tmp_path, into={"w": wanted})

    assert (loaded.tag, loaded.step) == ("step-2", 2)
    assert torch.equal(wanted, torch.full((4,), 2.0))


def test_delete_takes_a_checkpoint_away(tmp_path):
    save_steps(tmp_path, 1, 2)

    delete(tmp_path, "step-2")

    assert tags(tmp_path) == ["step-1"]
    assert sorted(os.listdir(tmp_path)) == [".staging", ".trash", "LATEST", "step-1"]
    assert os.listdir(tmp_path / ".trash") == []


def test_delete_what_is_not_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("five years")

    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'notes' in .*; available: none"):
        delete(tmp_path, "notes")
    with pytest.raises(ValueError, match=r"tag '../x' is not allowed"):
        delete(tmp_path, "../x")

    assert (tmp_path / "notes" / "thesis.tex").exists()


def test_delete_interrupted_leaves_no_half_checkpoint_and_the_next_save_tidies_up(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            delete(tmp_path, "step-2")

    assert tags(tmp_path) == ["step-1"]
    assert len(os.listdir(tmp_path / ".trash")) == 1
    save_steps(tmp_path, 3)
    assert os.listdir(tmp_path / ".trash") == []


def test_save_removes_what_a_dead_save_left_in_staging(tmp_path):
    (tmp_path / ".staging" / "dead" / "data").mkdir(parents=True)
    (tmp_path / ".staging" / "dead" / "data" / "x.safetensors").write_bytes(b"half")

    save_steps(tmp_path, 1)

    assert os.listdir(tmp_path / ".staging") == ["lock"]


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [30]), (2, [20, 30]), (3, [10, 20, 30]), (9, [10, 20, 30])])
def test_retain_keeps_the_newest_and_nothing_that_is_not_a_checkpoint_counts(tmp_path, keep_last, kept):
    save_steps(tmp_path, 30, 10, 20)
    (tmp_path / "zz-incomplete" / "data").mkdir(parents=True)
    (tmp_path / "notes").mkdir()

    removed = retain(tmp_path, keep_last=keep_last)

    assert tags(tmp_path) == [f"step-{step}" for step in kept]
    assert removed == [f"step-{step}" for step in (10, 20, 30) if step not in kept]
    assert (tmp_path / "zz-incomplete" / "data").exists()
    assert (tmp_path / "notes").exists()


@pytest.mark.parametrize("keep_last", [0, -1])
def test_retain_nothing_is_refused(tmp_path, keep_last):
    save_steps(tmp_path, 1)

    with pytest.raises(ValueError, match=f"keep_last={keep_last} would remove the newest checkpoint; use 1 or more"):
        retain(tmp_path, keep_last=keep_last)

    assert tags(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("checkpoint", r"it is itself a checkpoint: pass '.*runs' as the path and 'step-1' as the tag"),
        ("dangling link", "it is a link to nowhere, which does not exist"),
        ("file", "it is not a folder"),
        ("dcp", "see nxd_ckpt.interop.open_torch_dcp"),
        ("hf", "see nxd_ckpt.interop.open_hugging_face"),
    ],
)
def test_load_of_what_is_no_folder_of_checkpoints_says_what_it_is(tmp_path, there, message):
    path = tmp_path / "runs" / "step-1"
    save_steps(path.parent, 1)
    if there != "checkpoint":
        delete(path.parent, "step-1")
    if there == "dangling link":
        path.symlink_to("nowhere")
    elif there == "file":
        path.write_text("x")
    elif there != "checkpoint":
        path.mkdir()
        (path / {"dcp": ".metadata", "hf": "model.safetensors"}[there]).write_text("x")

    for tag in (None, "step-1"):
        with pytest.raises(CheckpointError, match=message):
            load(path, tag, into={"w": torch.zeros(4)})
    if there in ("dangling link", "file"):
        with pytest.raises(CheckpointError, match=f"{path} is (a link to nowhere, which is )?not a folder"):
            save_steps(path, 1)


@pytest.mark.parametrize("damage", ["none", "of the newest manifest", "of the newest data"])
def test_latest_and_load_with_fallback_resume_from_the_newest_that_can_be_read(tmp_path, damage):
    save_steps(tmp_path, 1, 2, 3)
    if damage == "of the newest manifest":
        (tmp_path / "step-3" / "manifest.json").write_text("damaged")
    elif damage == "of the newest data":
        next((tmp_path / "step-3" / "data").iterdir()).write_bytes(b"damaged")
    wanted = torch.zeros(4)

    with nullcontext() if damage == "none" else pytest.warns(UserWarning, match="step-3"):
        assert latest(tmp_path, fallback=True) is not None
        loaded = load(tmp_path, into={"w": wanted}, fallback=True)

    assert loaded.step == (3 if damage == "none" else 2)


def test_latest_with_fallback_of_an_absent_folder_is_none(tmp_path):
    assert latest(tmp_path / "absent", fallback=True) is None


def test_latest_with_nothing_readable_is_an_error_so_that_no_run_starts_anew(tmp_path):
    save_steps(tmp_path, 1)
    (tmp_path / "step-1" / "manifest.json").write_text("damaged")

    with (
        pytest.warns(UserWarning, match=r"step-1/manifest.json is not an nxd-ckpt manifest"),
        pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read: step-1; move them elsewhere"),
    ):
        latest(tmp_path, fallback=True)


def test_latest_past_a_damaged_manifest_says_what_to_pass_to_it(tmp_path):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-2" / "manifest.json").write_text("damaged")

    with pytest.raises(CheckpointError, match="pass fallback=True to skip it, or move it elsewhere"):
        latest(tmp_path)
