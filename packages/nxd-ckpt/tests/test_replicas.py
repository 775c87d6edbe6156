"""Ranks that hold the same box must hold the same bits; `check_replicas=True` refuses to save them if they do not."""

import pytest
import torch
from nxd_ckpt import CheckpointError, Shard, ShardedTensor, async_save, end_async_saves, list_checkpoints, save
from nxd_ckpt.testing import outcomes_on_threads


@pytest.fixture(params=["save", "async_save"])
def save_and_wait(request):
    """`save`, or `async_save` and waiting for it."""

    def in_background(*args, **options):
        async_save(*args, **options).wait()

    yield save if request.param == "save" else in_background
    end_async_saves()


def state_of(rank):
    """Of 3 ranks: all hold "all", ranks 0 and 1 the first half of "halves", and rank 2 all of it."""
    halves = torch.arange(8.0).reshape(4, 2)
    held = Shard(halves[:2].clone(), (0, 0)) if rank < 2 else Shard(halves.clone(), (0, 0))
    return {
        "all": torch.arange(6).to(torch.bfloat16),
        "halves": ShardedTensor((4, 2), [held]),
        f"own{rank}": torch.full((3,), float(rank)),
    }


def outcomes_of(root, save_and_wait, change, **options):
    def save_one(ranks):
        state = state_of(ranks.rank)
        change(ranks.rank, state)
        save_and_wait(root, "t", state, process_group=ranks, **options)

    return outcomes_on_threads(save_one, 3)


def flip(wrong_rank, name):
    """Flips the lowest bit of the first element that the rank holds of a tensor."""

    def change(rank, state):
        if rank == wrong_rank:
            tensor = state[name] if isinstance(state[name], torch.Tensor) else state[name].shards[0].tensor
            tensor.view(torch.uint8).reshape(-1)[0] ^= 1

    return change


@pytest.mark.sample(4)
@pytest.mark.parametrize(("rank", "name"), [(0, "all"), (1, "all"), (2, "all"), (1, "halves"), (2, "halves")])
def test_save_replicas_that_differ_in_a_bit_are_refused_on_all_ranks_and_nothing_is_saved(
    tmp_path, save_and_wait, rank, name
):
    outcomes = outcomes_of(tmp_path, save_and_wait, flip(rank, name), check_replicas=True)

    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert f"{name!r} [0:" in str(outcomes[0])
    assert "differs from the copy that rank" in str(outcomes[0])
    assert "the replicas are no longer equal; load an earlier checkpoint" in str(outcomes[0])
    assert list_checkpoints(tmp_path) == []


def test_save_replicas_that_are_equal_are_saved(tmp_path, save_and_wait):
    outcomes = outcomes_of(tmp_path, save_and_wait, lambda rank, state: None, check_replicas=True)

    assert outcomes == [None] * 3
    assert [info.tag for info in list_checkpoints(tmp_path)] == ["t"]


def test_save_without_check_replicas_takes_what_one_rank_holds(tmp_path, save_and_wait):
    assert outcomes_of(tmp_path, save_and_wait, flip(1, "all")) == [None] * 3


def test_save_ranks_that_do_not_all_check_replicas_are_refused(tmp_path):
    outcomes = outcomes_on_threads(
        lambda ranks: save(tmp_path, "t", {}, check_replicas=ranks.rank == 1, process_group=ranks), 2
    )

    for outcome in outcomes:
        with pytest.raises(
            ValueError,
            match=r"is .* False, False\) on rank 0 but .* True, False\) on rank 1",
        ):
            raise outcome
