"""nxd-ckpt over real processes and gloo; what does not need processes is tested with threads in the package."""

import json
import os
import signal

import pytest
import torch
import torch.distributed as dist
from nxd_ckpt import CheckpointError, Shard, ShardedTensor, list_checkpoints, load, open_checkpoint, save
from nxd_testing import RankFailure, run_on_ranks


def logical_tensors():
    """Matrices of more than 1 MiB, which ranks that hold the same share out to write, and smaller tensors."""
    generator = torch.Generator().manual_seed(0)
    return {
        "column.weight": torch.randn(640, 480, generator=generator),
        "row.weight": torch.randn(480, 1280, generator=generator).bfloat16(),
        "norm.weight": torch.randn(480, generator=generator),
        "step": torch.tensor(7),
    }


def shards_of(tensors, tp_rank, tp_size):
    """What a tensor-parallel rank holds: rows of one matrix, columns of the other, the rest whole."""

    def cut(name, dim):
        whole = tensors[name]
        size = whole.shape[dim] // tp_size
        offsets = [0] * whole.ndim
        offsets[dim] = tp_rank * size
        return ShardedTensor(whole.shape, [Shard(whole.narrow(dim, offsets[dim], size), offsets)])

    return tensors | {"column.weight": cut("column.weight", 0), "row.weight": cut("row.weight", 1)}


def local_tensors(value):
    return [shard.tensor for shard in value.shards] if isinstance(value, ShardedTensor) else [value]


def save_on_every_rank(root, tag, tp_size):
    rank = dist.get_rank()
    state = shards_of(logical_tensors(), rank % tp_size, tp_size)
    save(root, tag, state, step=3, objects={"seed": 1}, rank_objects={"rank": rank})


def load_on_every_rank(root, tp_size):
    rank = dist.get_rank()
    wholes = {name: torch.zeros_like(tensor) for name, tensor in logical_tensors().items()}
    loaded = load(root, into=shards_of(wholes, rank % tp_size, tp_size))
    return wholes, loaded


@pytest.mark.sample(3)
@pytest.mark.parametrize(("save_ranks", "save_tp"), [(4, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize(("load_ranks", "load_tp"), [(4, 4), (3, 1), (2, 2)])
def test_checkpoint_saved_at_one_layout_loads_at_another(tmp_path, save_ranks, save_tp, load_ranks, load_tp):
    root = str(tmp_path)
    run_on_ranks(save_on_every_rank, save_ranks, root, "a", save_tp)

    results = run_on_ranks(load_on_every_rank, load_ranks, root, load_tp)

    for rank, (wholes, loaded) in enumerate(results):
        assert loaded.objects == {"seed": 1}
        assert loaded.rank_objects == ({"rank": rank} if rank < save_ranks else None)
        expected = shards_of(logical_tensors(), rank % load_tp, load_tp)
        for name, tensor in shards_of(wholes, rank % load_tp, load_tp).items():
            for found, wanted in zip(local_tensors(tensor), local_tensors(expected[name]), strict=True):
                assert torch.equal(found, wanted)


def test_checkpoint_of_four_ranks_is_written_by_all_of_them_and_readable_by_one(tmp_path):
    run_on_ranks(save_on_every_rank, 4, str(tmp_path), "a", 2)

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.world_size == 4
    assert len(list((tmp_path / "a" / "data").iterdir())) == 4
    for name, tensor in logical_tensors().items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_save_in_a_subgroup_leaves_the_other_ranks_alone(tmp_path):
    def save_in_own_folder(root):
        pair = dist.get_rank() // 2
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        save(f"{root}/{pair}", "a", {"w": torch.full((2,), float(pair))}, process_group=groups[pair])

    run_on_ranks(save_in_own_folder, 4, str(tmp_path))

    for pair in (0, 1):
        checkpoint = open_checkpoint(tmp_path / str(pair))
        assert checkpoint.world_size == 2
        assert torch.equal(checkpoint.read("w"), torch.full((2,), float(pair)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("overwrite", [False, True])
def test_save_rank_killed_in_the_middle_leaves_the_old_checkpoint_and_ends_the_others(tmp_path, victim, overwrite):
    root = str(tmp_path / "root")
    run_on_ranks(save_on_every_rank, 3, root, "a", 1)

    def save_and_die(root, notes, victim, overwrite):
        if dist.get_rank() == victim:
            os.write = lambda fd, content: os.kill(os.getpid(), signal.SIGKILL)
        state = {name: tensor + 1 for name, tensor in logical_tensors().items()}
        try:
            save(root, "a" if overwrite else "b", state, overwrite=overwrite, timeout=600.0)
        except CheckpointError as error:
            with open(f"{notes}/{dist.get_rank()}", "w") as file:
                file.write(str(error))
            raise

    with pytest.raises(RankFailure) as failure:
        run_on_ranks(save_and_die, 3, root, str(tmp_path), victim, overwrite)

    assert "SIGKILL" in failure.value.failures[victim].summary
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim} of 3 is gone: its process has ended" in (tmp_path / str(rank)).read_text()
    assert [info.tag for info in list_checkpoints(root)] == ["a"]
    for name, tensor in logical_tensors().items():
        assert torch.equal(open_checkpoint(root, "a").read(name), tensor)
    run_on_ranks(save_on_every_rank, 3, root, "b", 1)
    assert os.listdir(f"{root}/.staging") == ["lock"]


def test_save_gives_up_a_rank_that_does_not_come_after_the_seconds_of_the_environment(tmp_path):
    def save_alone(root):
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["given up"])
            return ""
        try:
            save(root, "a", {})
        except CheckpointError as error:
            return str(error)
        finally:
            store.set("given up", "")
        return "saved"

    text, _ = run_on_ranks(save_alone, 2, str(tmp_path), env={"NXD_TIMEOUT": "0.5"})

    assert "no answer within 0.5 seconds from rank 1 of 2" in text


def test_save_rank_that_fails_is_named_by_all(tmp_path):
    def save_and_fail(root):
        if dist.get_rank() == 1:

            def full(fd, content):
                raise OSError(28, os.strerror(28))

            write, os.write = os.write, full
        try:
            save(root, "a", logical_tensors())
        except CheckpointError as error:
            return str(error)
        finally:
            if dist.get_rank() == 1:
                os.write = write
        return None

    texts = run_on_ranks(save_and_fail, 3, str(tmp_path))

    assert len(set(texts)) == 1
    assert "failed on 1 of 3 ranks\n  rank 1: OSError: [Errno 28] No space left on device" in texts[0]
    assert list_checkpoints(tmp_path) == []


def test_manifest_of_many_ranks_lists_every_file_once(tmp_path):
    run_on_ranks(save_on_every_rank, 4, str(tmp_path), "a", 4)

    manifest = json.loads((tmp_path / "a" / "manifest.json").read_bytes())

    assert sorted(manifest["files"]) == sorted(f"data/{path.name}" for path in (tmp_path / "a" / "data").iterdir())
    assert manifest["rank_objects"] == {str(rank): {"rank": rank} for rank in range(4)}
