"""What a load does when it is asked to verify, convert, fall back, or to give back what lay beside the tensors."""

import threading

import pytest
import torch
from nxd_ckpt import Checkpoint, CheckpointError, Shard, ShardedTensor, checksums, load, open_checkpoint, save
from nxd_ckpt.testing import Killed, outcomes_on_threads, run_on_threads


def flip_a_bit(root, tag, where=-1):
    """In the last byte of the last data file, or another one."""
    path = max((root / tag / "data").iterdir())
    content = bytearray(path.read_bytes())
    content[where] ^= 0b100
    path.write_bytes(content)


def test_load_flipped_bit_is_noticed_by_all_ranks(tmp_path):
    save(tmp_path, "t", {"w": torch.arange(1000)})
    flip_a_bit(tmp_path, "t")

    outcomes = outcomes_on_threads(
        lambda ranks: load(tmp_path, "t", into={"w": torch.zeros(1000).long()}, process_group=ranks), 2
    )

    assert isinstance(outcomes[0], CheckpointError)
    assert str(outcomes[0]) == str(outcomes[1])
    assert "failed on 2 of 2 ranks: data file" in str(outcomes[0])
    assert str(outcomes[0]).endswith(
        "8000 bytes from byte 128 on do not match their checksum; "
        "use another checkpoint: pass its tag, or fallback=True without a tag"
    )


@pytest.mark.parametrize("part", [slice(0, 10), slice(5, 6), slice(990, 1000)])
def test_load_part_of_a_damaged_block_is_refused_wherever_the_damage_is(tmp_path, part):
    save(tmp_path, "t", {"w": torch.arange(1000)})
    flip_a_bit(tmp_path, "t", where=-4000)
    shard = Shard(torch.zeros(1000).long()[part], (part.start,))

    with pytest.raises(CheckpointError, match="do not match their checksum"):
        load(tmp_path, "t", into={"w": ShardedTensor((1000,), [shard])})


def test_load_other_block_than_the_damaged_one_goes_well(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 800)
    save(tmp_path, "t", {"w": torch.arange(1000)})
    flip_a_bit(tmp_path, "t")
    checkpoint = open_checkpoint(tmp_path)

    assert torch.equal(checkpoint.read_box("w", (0,), (900,)), torch.arange(900))
    with pytest.raises(CheckpointError, match="800 bytes from byte 7328 on do not match"):
        checkpoint.read_box("w", (950,), (1,))
    assert len(checkpoint.damage()) == 1
    assert "do not match their checksum" in checkpoint.damage()[0]


def test_load_without_verify_takes_damaged_data(tmp_path):
    save(tmp_path, "t", {"w": torch.arange(1000)})
    flip_a_bit(tmp_path, "t", where=-8)
    wanted = torch.zeros(1000).long()

    load(tmp_path, "t", into={"w": wanted}, verify=False)

    assert torch.equal(wanted[:-1], torch.arange(999))
    assert wanted[-1] == 999 ^ 0b100


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_load_convert_dtype_gives_converted_values(tmp_path, stride, verify):
    saved = torch.randn(6, 8)
    save(tmp_path, "t", {"w": saved})
    wanted = torch.zeros(6, 8 * stride, dtype=torch.bfloat16)[:, ::stride]

    load(tmp_path, into={"w": wanted}, convert_dtype=True, verify=verify)

    assert torch.equal(wanted, saved.bfloat16())


def test_load_fallback_takes_the_newest_readable_one_and_says_what_it_skipped(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", {"w": torch.full((10,), float(step))}, step=step)
    flip_a_bit(tmp_path, "step-3")
    next((tmp_path / "step-2" / "data").iterdir()).unlink()
    wanted = [torch.zeros(10), torch.zeros(10)]

    with pytest.warns(UserWarning, match="skipped a checkpoint and loaded 'step-1' instead") as warned:
        loaded = run_on_threads(
            lambda ranks: load(tmp_path, into={"w": wanted[ranks.rank]}, fallback=True, process_group=ranks), 2
        )

    assert [one.tag for one in loaded] == ["step-1", "step-1"]
    assert all(torch.equal(one, torch.full((10,), 1.0)) for one in wanted)
    skipped = {str(warning.message) for warning in warned}
    assert any("do not match their checksum" in text for text in skipped)
    assert any("is missing" in text for text in skipped)
    assert not any("use another checkpoint" in text for text in skipped)  # it does


def test_load_fallback_with_nothing_readable_lists_what_was_wrong(tmp_path):
    save(tmp_path, "t", {"w": torch.ones(10)})
    flip_a_bit(tmp_path, "t")

    with pytest.raises(CheckpointError, match=r"no checkpoint in .* could be loaded:\n  loading checkpoint 't'"):
        load(tmp_path, into={"w": torch.zeros(10)}, fallback=True)


def test_load_fallback_does_not_hide_that_the_caller_asks_for_something_else(tmp_path):
    save(tmp_path, "old", {"w": torch.ones(10)}, step=1)
    save(tmp_path, "new", {"v": torch.ones(10)}, step=2)

    with pytest.raises(CheckpointError, match=r"'w' torch.float32 .* was requested but is not in the checkpoint"):
        load(tmp_path, into={"w": torch.zeros(10)}, fallback=True)


def test_extra_files_and_mesh_come_back(tmp_path):
    files = {"tokenizer.json": b"{}" * 1000, "empty": b""}

    save(tmp_path, "t", {}, extra=files, mesh={"tp": 2, "pp": [0, 1]})
    checkpoint = open_checkpoint(tmp_path)

    assert {name: checkpoint.read_extra(name) for name in checkpoint.extra} == files
    assert checkpoint.mesh == {"tp": 2, "pp": [0, 1]}
    with pytest.raises(ValueError, match="has no extra file 'other'; it has"):
        checkpoint.read_extra("other")


def test_extra_file_that_was_changed_is_refused(tmp_path):
    save(tmp_path, "t", {}, extra={"a": b"first"})
    next((tmp_path / "t" / "extra").iterdir()).write_bytes(b"other")

    with pytest.raises(CheckpointError, match="5 bytes from byte 0 on do not match their checksum"):
        open_checkpoint(tmp_path).read_extra("a")


def test_overwrite_replaces_extra_files(tmp_path):
    save(tmp_path, "t", {}, extra={"a": b"old", "b": b"old"})
    save(tmp_path, "t", {}, extra={"a": b"new"}, overwrite=True)

    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.extra == ["a"]
    assert checkpoint.read_extra("a") == b"new"
    assert len(list((tmp_path / "t" / "extra").iterdir())) == 1


def test_second_save_of_the_same_layout_sends_no_descriptions(tmp_path):
    sent = []

    class Counting:
        def __init__(self, inner):
            self._inner, self.rank, self.world_size = inner, inner.rank, inner.world_size

        def all_gather_object(self, value):
            sent.append(value)
            return self._inner.all_gather_object(value)

    def save_as(tag, size):
        sent.clear()
        state = {"only-here": torch.ones(size)}
        run_on_threads(lambda ranks: save(tmp_path, tag, state, process_group=Counting(ranks)), 2)
        return sum("only-here" in str(value) for value in sent)

    assert save_as("first", 11) == 2
    assert save_as("second", 11) == 0
    assert save_as("third", 12) == 2
    assert torch.equal(open_checkpoint(tmp_path, "second").read("only-here"), torch.ones(11))


def test_load_fallback_does_not_take_a_lost_rank_for_a_damaged_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, f"step-{step}", {"w": torch.ones(10)}, step=step)

    def fill_or_die(checkpoint, transfers):
        if threading.current_thread().name == "rank 1":
            raise Killed

    monkeypatch.setattr(Checkpoint, "fill", fill_or_die)

    first, second = outcomes_on_threads(
        lambda ranks: load(tmp_path, into={"w": torch.zeros(10)}, fallback=True, process_group=ranks), 2
    )

    assert str(first) == "rank 0 of 2 lost contact with the other ranks"
    assert isinstance(second, Killed)
