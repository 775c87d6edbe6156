"""The order in which a save makes things durable, spelled out; `test_power_loss.py` shows that it is enough."""

import os

import torch
from nxd_ckpt import open_checkpoint, save


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
