"""Which checkpoints stay: by rules that can be added up, never without the newest, and counting only whole ones."""

import contextlib
import os
import shutil

import pytest
import torch
from nxd_ckpt import CheckpointError, delete, gc, list_checkpoints, open_checkpoint, pin, retain, retention, save, unpin


def save_steps(root, *steps, losses=None):
    for number, step in enumerate(steps):
        metrics = {} if losses is None else {"metrics": {"loss": losses[number]}}
        save(root, f"step-{step}", {"w": torch.full((4,), float(step))}, step=step, objects=metrics)


def steps(root):
    return [info.step for info in list_checkpoints(root)]


def test_retain_keep_every_keeps_multiples_besides_the_last(tmp_path):
    save_steps(tmp_path, 5, 10, 15, 20, 25, 30, 35)

    removed = retain(tmp_path, keep_last=1, keep_every=10)

    assert steps(tmp_path) == [10, 20, 30, 35]
    assert removed == ["step-5", "step-15", "step-25"]


def test_retain_keep_every_leaves_out_those_without_a_step(tmp_path):
    save(tmp_path, "none", {})
    save_steps(tmp_path, 10, 11)

    retain(tmp_path, keep_last=1, keep_every=10)

    assert steps(tmp_path) == [10, 11]


@pytest.mark.parametrize(("best", "kept"), [("lowest", [2, 4, 5]), ("highest", [1, 3, 5])])
def test_retain_keep_best_keeps_the_best_by_a_metric(tmp_path, best, kept):
    save_steps(tmp_path, 1, 2, 3, 4, 5, losses=[0.9, 0.1, 0.8, 0.2, 0.5])

    retain(tmp_path, keep_last=1, keep_best=2, metric="loss", best=best)

    assert steps(tmp_path) == kept


def test_retain_keep_best_of_equals_keeps_the_newer(tmp_path):
    save_steps(tmp_path, 1, 2, 3, losses=[0.5, 0.5, 0.9])

    retain(tmp_path, keep_last=1, keep_best=1, metric="loss")

    assert steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("value", ["0.1", None, True, 10**400, [0.1]], ids=str)
def test_retain_keep_best_leaves_out_what_is_no_number(tmp_path, value):
    save_steps(tmp_path, 1, 2, 3, losses=[value, 0.5, 0.9])

    retain(tmp_path, keep_last=1, keep_best=1, metric="loss")

    assert steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("objects", [None, [1], {"metrics": 3}, {"metrics": {"other": 1}}, {}], ids=str)
def test_retain_keep_best_leaves_out_those_without_the_metric(tmp_path, objects):
    save(tmp_path, "a", {}, step=1, objects=objects)
    save_steps(tmp_path, 2, 3, losses=[0.5, 0.9])

    retain(tmp_path, keep_last=1, keep_best=2, metric="loss")

    assert steps(tmp_path) == [2, 3]


def test_retain_never_removes_pinned_ones(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4)
    pin(tmp_path, "step-1")

    assert retain(tmp_path, keep_last=1) == ["step-2", "step-3"]
    unpin(tmp_path, "step-1")
    assert retain(tmp_path, keep_last=1) == ["step-1"]


def test_retain_newest_by_step_stays_though_another_was_saved_last(tmp_path):
    save_steps(tmp_path, 9, 3, 1)

    retain(tmp_path, keep_last=1)

    assert steps(tmp_path) == [9]
    assert (tmp_path / "LATEST").read_text() == "step-1\n"  # only a hint


def test_retain_damaged_newest_counts_for_nothing_and_is_not_touched(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    damaged = tmp_path / "step-3" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])

    with pytest.warns(UserWarning, match="step-3/manifest.json is damaged"):
        assert retain(tmp_path, keep_last=1) == ["step-1"]

    assert open_checkpoint(tmp_path, "step-2").step == 2
    assert damaged.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(os.unlink, "is missing"), (lambda path: os.truncate(path, 3), "has 3 bytes, expected")],
    ids=["missing", "cut"],
)
def test_retain_newest_with_damaged_files_counts_for_nothing_and_is_not_touched(tmp_path, damage, message):
    save_steps(tmp_path, 1, 2, 3)
    (data,) = (tmp_path / "step-3" / "data").iterdir()
    damage(data)

    with pytest.warns(UserWarning, match=f"skipping an incomplete checkpoint: data file {data} {message}"):
        assert retain(tmp_path, keep_last=1) == ["step-1"]

    assert steps(tmp_path) == [2, 3]
    assert open_checkpoint(tmp_path, "step-2").read("w").tolist() == [2.0] * 4


@pytest.mark.parametrize("meanwhile", ["overwritten", "deleted"])
def test_retain_leaves_alone_what_another_process_has_changed_meanwhile(tmp_path, monkeypatch, meanwhile):
    save_steps(tmp_path, 1, 2, 3)

    def judge(path):
        judged = list_checkpoints(path)
        if meanwhile == "deleted":
            delete(path, "step-1")
        else:
            save(path, "step-1", {}, step=9, overwrite=True)
        return judged

    monkeypatch.setattr(retention, "list_checkpoints", judge)

    with contextlib.nullcontext() if meanwhile == "overwritten" else pytest.warns(UserWarning, match="step-1"):
        assert retain(tmp_path, keep_last=1) == ["step-2"]
    assert steps(tmp_path) == ([3, 9] if meanwhile == "overwritten" else [3])


@pytest.mark.parametrize("incremental", [False, True], ids=["full", "incremental"])
def test_retain_while_a_save_is_at_work_keeps_the_newest_complete_ones_and_the_save_ends_well(
    tmp_path, monkeypatch, incremental
):
    removed = []
    fsync = os.fsync

    def fsync_and_retain(fd):
        if not removed:
            removed.append(None)
            removed[0] = retain(tmp_path, keep_last=1)
        fsync(fd)

    state = {"same": torch.ones(4), "w": torch.zeros(4)}
    for step in (1, 2):
        state["w"] += 1
        save(tmp_path, f"step-{step}", state, step=step, incremental=incremental)
    monkeypatch.setattr(os, "fsync", fsync_and_retain)
    state["w"] += 1
    save(tmp_path, "step-3", state, step=3, incremental=incremental)

    assert removed == [["step-1"]]
    assert steps(tmp_path) == [2, 3]
    for step in (2, 3):
        saved = open_checkpoint(tmp_path, f"step-{step}")
        assert (saved.read("same").tolist(), saved.read("w").tolist()) == ([1.0] * 4, [float(step)] * 4)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"keep_last": 0}, "keep_last=0 would remove the newest checkpoint; use 1 or more"),
        ({"keep_last": 1, "keep_every": 0}, "keep_every=0 is not a number of steps; use 1 or more, or None"),
        ({"keep_last": 1, "keep_best": 1}, "keep_best=1 and metric=None belong together: pass both or neither"),
        ({"keep_last": 1, "metric": "loss"}, "keep_best=0 and metric='loss' belong together: pass both or neither"),
        (
            {"keep_last": 1, "keep_best": 1, "metric": "loss", "best": "smallest"},
            "best='smallest' is neither 'lowest' nor 'highest'",
        ),
    ],
)
def test_retain_rules_that_make_no_sense_are_refused(tmp_path, rules, message):
    save_steps(tmp_path, 1)

    with pytest.raises(ValueError, match=message):
        retain(tmp_path, **rules)

    assert steps(tmp_path) == [1]


def test_latest_hint_is_not_read(tmp_path):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "LATEST").write_text("step-1\n")

    assert open_checkpoint(tmp_path).step == 2
    (tmp_path / "LATEST").unlink()
    assert open_checkpoint(tmp_path).step == 2


def test_latest_hint_that_cannot_be_left_does_not_fail_the_save(tmp_path):
    (tmp_path / "LATEST").mkdir()

    save_steps(tmp_path, 1)

    assert steps(tmp_path) == [1]
    assert os.listdir(tmp_path / ".staging") == ["lock"]


def test_pin_outlives_the_folder_being_saved_anew(tmp_path):
    save_steps(tmp_path, 1, 2)
    pin(tmp_path, "step-1")
    save(tmp_path, "step-1", {}, step=1, overwrite=True)

    assert [info.pinned for info in list_checkpoints(tmp_path)] == [True, False]
    with pytest.raises(CheckpointError, match=r"checkpoint 'step-1' in .* is pinned; unpin it first"):
        delete(tmp_path, "step-1")


@pytest.mark.parametrize("function", [pin, unpin, delete])
def test_tag_that_leads_elsewhere_is_refused(tmp_path, function):
    with pytest.raises(ValueError, match=r"tag '\.\./x' is not allowed"):
        function(tmp_path, "../x")


def test_gc_finds_what_dead_saves_and_deletions_left_and_nothing_else(tmp_path):
    save_steps(tmp_path, 1)
    (tmp_path / ".staging" / "dead" / "data").mkdir(parents=True)
    (tmp_path / ".staging" / "dead" / "data" / "x.safetensors").write_bytes(b"12345")
    (tmp_path / ".trash" / "gone").mkdir(parents=True)
    orphan = tmp_path / "step-1" / "data" / f"{'a' * 32}-00000-0.safetensors"
    orphan.write_bytes(b"123")
    (tmp_path / "step-1" / "data" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere" / "data").mkdir(parents=True)

    found = gc(tmp_path, dry_run=True)

    assert [(garbage.path, garbage.num_bytes) for garbage in found] == [
        (str(tmp_path / ".staging" / "dead"), 5),
        (str(tmp_path / ".trash" / "gone"), 0),
        (str(orphan), 3),
    ]
    assert orphan.exists()
    assert gc(tmp_path) == found
    assert gc(tmp_path) == []
    assert not orphan.exists()
    assert (tmp_path / "step-1" / "data" / "notes.txt").exists()
    assert (tmp_path / "elsewhere" / "data").exists()
    assert open_checkpoint(tmp_path).read("w").tolist() == [1.0] * 4


def test_gc_while_a_save_is_at_work_is_refused(tmp_path, monkeypatch):
    errors = []
    fsync = os.fsync

    def fsync_and_collect(fd):
        if not errors:
            errors.append(None)
            with pytest.raises(CheckpointError, match="another save is in progress in") as error:
                gc(tmp_path)
            errors[0] = error.value
        fsync(fd)

    save_steps(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", fsync_and_collect)
    save_steps(tmp_path, 2)

    assert isinstance(errors[0], CheckpointError)
    assert steps(tmp_path) == [1, 2]


def test_gc_that_frees_much_keeps_no_save_waiting(tmp_path, monkeypatch):
    (tmp_path / ".staging" / "dead" / "data").mkdir(parents=True)
    remove_folder = shutil.rmtree

    def save_and_remove(path, **options):
        monkeypatch.setattr(shutil, "rmtree", remove_folder)
        save_steps(tmp_path, 1)
        remove_folder(path, **options)

    monkeypatch.setattr(shutil, "rmtree", save_and_remove)

    gc(tmp_path)

    assert steps(tmp_path) == [1]


def test_gc_where_there_is_nothing_finds_nothing(tmp_path):
    assert gc(tmp_path / "absent") == []
    assert not (tmp_path / "absent").exists()
