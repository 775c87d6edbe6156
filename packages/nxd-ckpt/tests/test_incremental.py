"""An incremental save writes what has changed, and stands on its own: whatever is deleted, it can be read."""

import os
import uuid

import pytest
import torch
from nxd_ckpt import (
    CheckpointError,
    Shard,
    ShardedTensor,
    async_save,
    delete,
    end_async_saves,
    gc,
    list_checkpoints,
    load,
    open_checkpoint,
    pin,
    retain,
    save,
    stores,
)
from nxd_ckpt.cli.main import main
from nxd_ckpt.incremental import CHUNK_BYTES, Base
from nxd_ckpt.testing import outcomes_on_threads, run_on_threads

FROZEN = {f"frozen{number}": torch.full((1000,), float(number)) for number in range(5)}


@pytest.fixture(params=["folder", "memory"])
def root(request, tmp_path):
    """An empty place for checkpoints."""
    return str(tmp_path / "root") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def state_of(step):
    return FROZEN | {"trained": torch.full((10,), float(step))}


def save_steps(root, *steps, **options):
    for step in steps:
        save(root, f"step-{step}", state_of(step), step=step, incremental=True, **options)


def sizes(root):
    return {info.step: info.num_bytes for info in list_checkpoints(root)}


def check(root, step):
    """Every byte is as it was saved."""
    checkpoint = open_checkpoint(root, f"step-{step}")
    assert checkpoint.damage() == []
    assert sorted(checkpoint.tensors) == sorted(state_of(step))
    for name, expected in state_of(step).items():
        assert torch.equal(checkpoint.read(name), expected)


def exists(root, tag, file):
    try:
        stores.open_store(root).file_size(tag, file)
    except FileNotFoundError:
        return False
    return True


def data_files(root, tag):
    """What its manifest lists, whether it lies with it or is referenced."""
    return list(open_checkpoint(root, tag).manifest.files)


def test_incremental_save_writes_only_what_has_changed_and_reads_back(root):
    save_steps(root, 1, 2, 3)

    assert sizes(root)[1] > 5 * 4000
    assert sizes(root)[2] < 400
    assert sizes(root)[3] < 400
    for step in (1, 2, 3):
        check(root, step)
    destination = {name: torch.zeros_like(tensor) for name, tensor in state_of(3).items()}
    load(root, into=destination)
    assert all(torch.equal(destination[name], tensor) for name, tensor in state_of(3).items())


def test_incremental_save_of_nothing_new_writes_no_data(root):
    save_steps(root, 1)
    save(root, "again", state_of(1), step=2, incremental=True)

    assert sizes(root)[2] == 0
    assert torch.equal(open_checkpoint(root, "again").read("trained"), state_of(1)["trained"])


def test_incremental_save_finds_the_same_bytes_under_another_name_and_shape_but_not_type(root):
    value = torch.arange(1000.0)
    save(root, "a", {"w": value}, incremental=True)
    save(root, "b", {"other": value.reshape(10, 100)}, incremental=True)
    save(root, "c", {"other": value.view(torch.int32)}, incremental=True)

    written = {info.tag: info.num_bytes for info in list_checkpoints(root)}
    assert written["b"] == 0
    assert written["c"] > 4000
    assert torch.equal(open_checkpoint(root, "b").read("other"), value.reshape(10, 100))


def test_incremental_save_of_changed_rows_writes_their_slabs(root):
    whole = torch.zeros(16, CHUNK_BYTES // 8)  # two rows to a chunk
    save(root, "a", {"w": whole}, step=1, incremental=True)
    whole[4:6] = 1.0
    save(root, "b", {"w": whole}, step=2, incremental=True)

    assert CHUNK_BYTES <= sizes(root)[2] < CHUNK_BYTES + 1000
    assert torch.equal(open_checkpoint(root, "b").read("w"), whole)


@pytest.mark.parametrize("kind", ["whole tensors", "rows that lie together"])
def test_incremental_save_of_a_model_of_which_5_percent_changed_writes_no_more_than_that(tmp_path, kind):
    state = {f"w{number}": torch.randn(2**20) for number in range(20)}  # 4 MiB each
    if kind == "rows that lie together":
        state = {"w": torch.stack(list(state.values())).reshape(20 * 2**10, 2**10)}
    save(tmp_path, "a", state, step=1, incremental=True)
    if kind == "rows that lie together":
        state["w"][5000:6024] += 1
    else:
        state["w7"] += 1
    save(tmp_path, "b", state, step=2, incremental=True)

    changed = 4 * 2**20
    lies_within = 1.05 * changed if kind == "whole tensors" else changed + CHUNK_BYTES + 1000
    assert changed <= sizes(tmp_path)[2] <= lies_within
    assert open_checkpoint(tmp_path, "b").damage() == []


@pytest.mark.parametrize("incremental", [False, True])
def test_only_a_checkpoint_with_references_is_of_the_version_that_older_readers_refuse(root, incremental):
    save_steps(root, 1)
    save(root, "next", state_of(2), step=2, incremental=incremental)

    manifests = {tag: stores.open_store(root).read_manifest(tag) for tag in ("step-1", "next")}
    assert b'"version":2,' in manifests["step-1"][:200]
    assert (b'"version":3,' in manifests["next"][:200]) == incremental


def test_incremental_save_after_one_that_was_not_writes_everything(root):
    save(root, "plain", state_of(1), step=1)
    save_steps(root, 2)

    assert sizes(root)[2] > 5 * 4000


def test_incremental_saves_at_another_number_of_ranks_find_what_is_cut_alike(tmp_path, rows_of):
    whole = {"w": torch.randn(8, 100), "v": torch.randn(6)}

    def save_rows(ranks, tag, step):
        cut = {name: rows_of(tensor, ranks.rank, 2) for name, tensor in whole.items()}
        save(tmp_path, tag, cut, step=step, incremental=True, process_group=ranks)

    run_on_threads(lambda ranks: save_rows(ranks, "a", 1), 2)
    whole["v"] = torch.randn(6)
    run_on_threads(lambda ranks: save_rows(ranks, "b", 2), 2)
    save(tmp_path, "c", whole, step=3, incremental=True)  # one rank holds both halves, as one box

    assert sizes(tmp_path)[2] < 1000
    assert sizes(tmp_path)[3] >= 3200
    for tag in ("b", "c"):
        assert all(torch.equal(open_checkpoint(tmp_path, tag).read(name), tensor) for name, tensor in whole.items())


def test_incremental_background_saves_write_only_what_has_changed(root):
    for step in (1, 2, 3):
        state = {name: tensor.clone() for name, tensor in state_of(step).items()}
        handle = async_save(root, f"step-{step}", state, step=step, incremental=True)
        for tensor in state.values():
            tensor.fill_(77.0)
    handle.wait()
    end_async_saves()

    assert sizes(root)[2] < 400
    assert sizes(root)[3] < 400
    retain(root, keep_last=1)
    check(root, 3)


def test_retain_keeps_the_data_that_others_reference_and_frees_it_with_the_last_of_them(root):
    save_steps(root, 1, 2, 3)
    first = data_files(root, "step-1")[0]

    assert retain(root, keep_last=1) == ["step-1", "step-2"]

    assert sizes(root).keys() == {3}
    check(root, 3)
    assert gc(root, dead_after=0) == []
    check(root, 3)
    save(root, "whole", {"x": torch.ones(2)}, step=9)
    delete(root, "step-3")
    assert not exists(root, "step-1", first)
    assert gc(root, dead_after=0) == []


def test_delete_in_any_order_leaves_the_others_whole(root):
    steps = {1, 2, 3, 4}
    for first in (2, 3, 1, 4):
        if not sizes(root):
            save_steps(root, *sorted(steps))
        delete(root, f"step-{first}")
        for step in sizes(root):
            check(root, step)

    assert gc(root, dead_after=0) == []


def test_pinned_checkpoint_keeps_what_it_references(root):
    save_steps(root, 1, 2, 3)
    pin(root, "step-2")

    retain(root, keep_last=1)

    assert sizes(root).keys() == {2, 3}
    check(root, 2)


def test_overwriting_a_base_leaves_those_that_reference_it_whole(root):
    save_steps(root, 1, 2)
    save(root, "step-1", {"x": torch.ones(3)}, step=0, overwrite=True)

    check(root, 2)
    assert gc(root, dead_after=0) == []
    check(root, 2)
    delete(root, "step-2")
    assert torch.equal(open_checkpoint(root, "step-1").read("x"), torch.ones(3))


def test_overwriting_the_newest_by_an_incremental_save_keeps_the_data_in_place(root):
    for step in (1, 2, 3):
        save(root, "last", state_of(step), step=step, incremental=True, overwrite=True)

        checkpoint = open_checkpoint(root, "last")
        assert checkpoint.damage() == []
        assert torch.equal(checkpoint.read("trained"), state_of(step)["trained"])
        assert checkpoint.manifest.references == {}
    assert len(data_files(root, "last")) == 2  # the second one's only chunk is of no use any more
    assert gc(root, dead_after=0) == []


def test_deleting_one_that_references_a_live_one_leaves_that_whole(root):
    save_steps(root, 1, 2)

    delete(root, "step-2")

    check(root, 1)


def test_tag_of_a_deleted_base_can_be_saved_anew(root):
    save_steps(root, 1, 2)
    delete(root, "step-1")

    save(root, "step-1", state_of(1), step=9)

    check(root, 1)
    check(root, 2)
    assert gc(root, dead_after=0) == []


def test_gc_takes_what_an_interrupted_deletion_left_and_not_what_others_need(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            delete(tmp_path, "step-2")
    delete(tmp_path, "step-1")

    gc(tmp_path)

    check(tmp_path, 3)
    assert gc(tmp_path) == []


def test_missing_base_is_noticed_by_verify_and_such_a_checkpoint_counts_for_nothing(tmp_path, capsys):
    save_steps(tmp_path, 1, 2)
    base = data_files(tmp_path, "step-1")[0]
    os.unlink(tmp_path / "step-1" / base)

    assert main(["verify", str(tmp_path), "--tag", "step-2"]) == 1
    assert f"{base} is missing; checkpoint 'step-2' references it in 'step-1'" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is missing"):
        load(tmp_path, into={name: torch.zeros_like(tensor) for name, tensor in state_of(2).items()})
    save_steps(tmp_path, 3)  # which does not build on what is gone
    check(tmp_path, 3)


def test_changed_bit_in_a_base_is_noticed_by_deep_verify_of_what_references_it(tmp_path, capsys):
    save_steps(tmp_path, 1, 2)
    path = tmp_path / "step-1" / data_files(tmp_path, "step-1")[0]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1  # of the last frozen one; before the trained one, which nothing references
    path.write_bytes(content)

    assert main(["verify", str(tmp_path), "--tag", "step-2"]) == 0
    assert main(["verify", str(tmp_path), "--tag", "step-2", "--deep"]) == 1
    assert "do not match their checksum" in capsys.readouterr().out


def test_good_incremental_checkpoint_is_good_for_deep_verify(tmp_path, capsys):
    save_steps(tmp_path, 1, 2)
    delete(tmp_path, "step-1")

    assert main(["verify", str(tmp_path), "--deep"]) == 0


@pytest.mark.parametrize("meanwhile", ["deleted", "overwritten"])
def test_base_that_goes_before_it_is_held_is_an_error_on_all_ranks_and_nothing_is_saved(root, monkeypatch, meanwhile):
    save_steps(root, 1)
    take = Base.take

    def lose_it_and_take(self, store, transaction):
        if meanwhile == "deleted":
            delete(root, "step-1")
        else:  # by another process, on a system without locks
            monkeypatch.setattr("nxd_ckpt.stores.posix.lock", lambda path: None)
            monkeypatch.setattr(Base, "take", take)
            save(root, "step-1", {}, overwrite=True)
        take(self, store, transaction)

    monkeypatch.setattr(Base, "take", lose_it_and_take)
    if meanwhile == "overwritten":
        monkeypatch.setattr("nxd_ckpt.stores.posix.lock", lambda path: None)

    with pytest.raises(CheckpointError, match="'step-1', whose data this incremental save references, has changed"):
        save_steps(root, 2)
    assert 2 not in sizes(root)


def test_base_that_is_overwritten_is_an_error_though_its_data_stays(root, monkeypatch):
    save_steps(root, 1)
    take = Base.take

    def overwrite_and_take(self, store, transaction):
        monkeypatch.setattr(Base, "take", take)
        save_steps(root, 1, overwrite=True)  # by another process, on a system without locks
        take(self, store, transaction)

    monkeypatch.setattr(Base, "take", overwrite_and_take)
    monkeypatch.setattr("nxd_ckpt.stores.posix.lock", lambda path: None)

    with pytest.raises(CheckpointError, match=r"'step-1', .* has changed: it was overwritten; save again"):
        save_steps(root, 2)
    assert sizes(root).keys() == {1}


def test_base_whose_deletion_has_begun_is_an_error_though_its_data_is_still_there(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)
    take = Base.take

    def retire_and_take(self, store, transaction):
        os.rename(tmp_path / "step-1" / "manifest.json", tmp_path / "step-1" / "retired.json")
        take(self, store, transaction)

    monkeypatch.setattr(Base, "take", retire_and_take)

    with pytest.raises(CheckpointError, match="has changed: there is no checkpoint 'step-1'"):
        save_steps(tmp_path, 2)


def test_base_that_is_deleted_once_it_is_held_stays_as_data(root, monkeypatch):
    save_steps(root, 1)
    take = Base.take

    def take_and_delete(self, store, transaction):
        take(self, store, transaction)
        delete(root, "step-1")

    monkeypatch.setattr(Base, "take", take_and_delete)

    save_steps(root, 2)

    assert sizes(root).keys() == {2}
    check(root, 2)


def test_hold_of_a_save_that_failed_is_gone(root, monkeypatch):
    save_steps(root, 1)

    def fail(*_):
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Base, "check_files", fail)
        with pytest.raises(CheckpointError, match="no"):
            save_steps(root, 2)

    assert stores.open_store(root).held() == set()
    delete(root, "step-1")
    assert gc(root, dead_after=0) == []


def test_replicas_that_differ_are_refused_though_nothing_has_to_be_written(tmp_path):
    save_steps(tmp_path, 1)

    def save_again(ranks):
        state = {name: tensor.clone() for name, tensor in state_of(1).items()}
        state["frozen2"][0] += ranks.rank
        save(tmp_path, "t", state, incremental=True, check_replicas=True, process_group=ranks)

    for outcome in outcomes_on_threads(save_again, 2):
        with pytest.raises(CheckpointError, match=r"'frozen2' .* differs from the copy that rank"):
            raise outcome


def test_ranks_that_do_not_all_save_incrementally_are_refused(tmp_path):
    outcomes = outcomes_on_threads(
        lambda ranks: save(tmp_path, "t", {}, incremental=ranks.rank == 1, process_group=ranks), 2
    )

    for outcome in outcomes:
        with pytest.raises(ValueError, match="check_replicas, incremental"):
            raise outcome


def test_manifest_that_cannot_be_read_keeps_all_data(tmp_path):
    save_steps(tmp_path, 1, 2)
    manifest = tmp_path / "step-2" / "manifest.json"
    manifest.rename(tmp_path / "elsewhere.json")
    manifest.mkdir()

    with pytest.warns(UserWarning, match="step-2/manifest.json cannot be read, so no data is removed"):
        delete(tmp_path, "step-1")

    manifest.rmdir()
    (tmp_path / "elsewhere.json").rename(manifest)
    check(tmp_path, 2)


def test_damaged_manifest_keeps_what_it_still_speaks_of(tmp_path):
    save_steps(tmp_path, 1, 2)
    manifest = tmp_path / "step-2" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-1])

    delete(tmp_path, "step-1")

    manifest.write_bytes(whole)
    check(tmp_path, 2)


def test_delete_of_a_damaged_manifest_leaves_what_others_need(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-2" / "manifest.json").write_text("damaged")
    delete(tmp_path, "step-1")

    delete(tmp_path, "step-2")

    check(tmp_path, 3)
    gc(tmp_path)
    check(tmp_path, 3)
    assert gc(tmp_path) == []


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_incremental_that_is_no_flag_is_refused(tmp_path, value):
    for call in (save, async_save):
        with pytest.raises(ValueError, match=f"incremental={value!r} is a .*; pass True or False"):
            call(tmp_path, "t", {}, incremental=value)


def test_incremental_save_of_shards_of_several_ranks_costs_no_frozen_weight_again(tmp_path):
    frozen, trained = torch.randn(64, 100), torch.randn(4, 100)

    def save_rows(ranks, step):
        def shard(whole):
            rows = whole.shape[0] // 2
            return ShardedTensor(whole.shape, [Shard(whole[ranks.rank * rows :][:rows], (ranks.rank * rows, 0))])

        state = {"frozen": shard(frozen), "lora": shard(trained + step)}
        save(tmp_path, f"step-{step}", state, step=step, incremental=True, process_group=ranks)

    for step in (1, 2):
        run_on_threads(lambda ranks, step=step: save_rows(ranks, step), 2)

    delete(tmp_path, "step-1")
    assert sizes(tmp_path)[2] < 4 * 400 + 2000
    assert torch.equal(open_checkpoint(tmp_path).read("frozen"), frozen)
    assert torch.equal(open_checkpoint(tmp_path).read("lora"), trained + 2)
