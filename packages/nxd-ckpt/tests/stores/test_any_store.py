"""What holds wherever checkpoints are stored."""

import threading

import fsspec
import nxd_ckpt.saving
import pytest
import torch
from nxd_ckpt import (
    CheckpointError,
    Shard,
    ShardedTensor,
    delete,
    gc,
    latest,
    list_checkpoints,
    load,
    open_checkpoint,
    pin,
    save,
    unpin,
)
from nxd_ckpt.peers.store import PeerStore
from nxd_ckpt.testing import outcomes_on_threads, run_on_threads


def save_value(root, tag, value, **options):
    save(root, tag, {"w": torch.full((4, 6), float(value))}, step=value, **options)


def value_of(root, tag):
    return open_checkpoint(root, tag).read("w").unique().item()


def remove_data(root, tag):
    if root.startswith("peers://"):
        for keeper, files in PeerStore(root).listings():
            keeper.remove([name for name in files if name.startswith(f"{tag}/data/")])
    else:
        fs, path = fsspec.core.url_to_fs(f"{root}/{tag}/data")
        fs.rm(path, recursive=True)


def tags(root):
    return [info.tag for info in list_checkpoints(root)]


def test_save_by_rows_loads_by_columns(root):
    whole = torch.arange(48.0).reshape(6, 8)

    def save_rows(ranks):
        rows = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        save(root, "t", {"w": ShardedTensor((6, 8), [Shard(whole[rows], (rows.start, 0))])}, process_group=ranks)

    def load_columns(ranks):
        mine = torch.zeros(6, 4)
        load(root, "t", into={"w": ShardedTensor((6, 8), [Shard(mine, (0, 4 * ranks.rank))])}, process_group=ranks)
        return mine

    run_on_threads(save_rows, 3)

    assert torch.equal(torch.cat(run_on_threads(load_columns, 2), dim=1), whole)


def test_list_checkpoints_orders_by_step_and_finds_nothing_in_an_empty_place(root):
    assert list_checkpoints(root) == []
    assert latest(root) is None
    for step in (10, 9, 100):
        save_value(root, f"s{step}", step)

    assert tags(root) == ["s9", "s10", "s100"]
    assert latest(root).tag == "s100"


def test_save_under_a_taken_tag_is_refused_and_overwrites_if_asked_to(root):
    save_value(root, "t", 1)

    with pytest.raises(CheckpointError, match="t exists; choose another tag or pass overwrite=True"):
        save_value(root, "t", 2)
    assert value_of(root, "t") == 1
    save_value(root, "t", 2, overwrite=True)

    assert value_of(root, "t") == 2
    assert gc(root, dead_after=0, dry_run=True) == []


def test_save_that_fails_on_one_rank_leaves_nothing(root, monkeypatch):
    file_parts = nxd_ckpt.saving.file_parts

    def parts_of_rank_zero(*args, **options):
        for part in file_parts(*args, **options):
            yield part
            if threading.current_thread().name == "rank 1":
                raise OSError("the disk is on fire")

    monkeypatch.setattr(nxd_ckpt.saving, "file_parts", parts_of_rank_zero)

    def save_one(ranks):
        part = Shard(torch.ones(2), (2 * ranks.rank,))
        save(root, "t", {"w": ShardedTensor((4,), [part])}, process_group=ranks)

    outcomes = outcomes_on_threads(save_one, 2)

    assert str(outcomes[0]) == str(outcomes[1])
    assert "failed on 1 of 2 ranks\n  rank 1: OSError: the disk is on fire" in str(outcomes[0])
    assert list_checkpoints(root) == []
    assert gc(root, dead_after=0) == []


def test_load_data_file_that_is_missing_says_so(root):
    save_value(root, "t", 1)
    checkpoint = open_checkpoint(root, "t")
    remove_data(root, "t")

    with pytest.raises(CheckpointError, match=r"data/.*\.safetensors.* is missing"):
        checkpoint.read("w")


def test_load_tag_that_is_not_there_says_which_there_are(root):
    save_value(root, "t", 1)

    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'x' in .*; there are: t"):
        load(root, "x", into={})


def test_delete_takes_a_checkpoint_away_and_its_data(root):
    save_value(root, "a", 1)
    save_value(root, "b", 2)

    delete(root, "a")

    assert tags(root) == ["b"]
    assert value_of(root, "b") == 2
    assert gc(root, dead_after=0) == []


def test_pin_survives_an_overwrite_and_keeps_from_delete_until_unpin(root):
    save_value(root, "a", 1)
    pin(root, "a")
    save_value(root, "a", 2, overwrite=True)
    gc(root, dead_after=0)

    assert list_checkpoints(root)[0].pinned
    with pytest.raises(CheckpointError, match=r"checkpoint 'a' in .* is pinned; unpin it first"):
        delete(root, "a")

    unpin(root, "a")
    unpin(root, "a")
    delete(root, "a")
    assert tags(root) == []


def test_pin_tag_that_is_not_there_is_refused(root):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'a' in .*; there are: none"):
        pin(root, "a")
