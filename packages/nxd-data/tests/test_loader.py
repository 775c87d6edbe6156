import numpy as np
import pytest
import torch
from nxd_data import HeldOutLoader, TrainLoader

BATCH = 12
LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (3, 2), (6, 2), (12, 1)]  # accumulation, data-parallel size


def loaders(sequences, accumulation=1, dp_size=1, batch=BATCH, seed=5):
    return [
        TrainLoader(
            sequences,
            global_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            dp_rank=rank,
            dp_size=dp_size,
            seed=seed,
        )
        for rank in range(dp_size)
    ]


def take_step(ranks):
    """The inputs of a step as `[microbatch, samples of all ranks one after another, seq]`."""
    steps = [loader.next_step() for loader in ranks]
    return torch.stack([torch.cat([batch.input_ids for batch in batches]) for batches in zip(*steps, strict=True)])


def samples_of_steps(ranks, num_steps):
    return torch.cat([take_step(ranks).flatten(0, 1) for _ in range(num_steps)])[:, 0].tolist()


def test_batch_is_int64_and_labels_are_the_next_tokens(numbered):
    (loader,) = loaders(numbered(50)[0])

    (batch,) = loader.next_step()

    assert batch.input_ids.shape == batch.labels.shape == (BATCH, 4)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.is_contiguous()
    assert batch.labels.is_contiguous()
    assert torch.equal(batch.labels, batch.input_ids + 1)


@pytest.mark.parametrize(("accumulation", "dp_size"), LAYOUTS)
def test_microbatch_is_the_ranks_slices_one_after_another(numbered, accumulation, dp_size):
    sequences, _ = numbered(50)
    whole = loaders(sequences)
    alone = loaders(sequences, accumulation)
    ranks = loaders(sequences, accumulation, dp_size)

    for _ in range(9):  # two epochs
        step = take_step(ranks)
        assert torch.equal(step, take_step(alone))
        assert torch.equal(step.flatten(0, 1), take_step(whole).flatten(0, 1))


def test_epoch_has_each_sample_once_and_the_next_another_order(numbered):
    sequences, _ = numbered(48)
    (loader,) = ranks = loaders(sequences)

    first, second = samples_of_steps(ranks, 4), samples_of_steps(ranks, 4)

    assert sorted(first) == sorted(second) == list(range(0, 192, 4))
    assert first != second
    assert first != sorted(first)
    assert loader.epoch == 2


def test_step_across_the_end_of_an_epoch_goes_on_in_the_next(numbered):
    sequences, _ = numbered(50)

    samples = samples_of_steps(loaders(sequences), 9)  # 108 samples of 50

    assert sorted(samples[:50]) == sorted(samples[50:100]) == list(range(0, 200, 4))


def test_batch_larger_than_the_data_takes_several_epochs(numbered):
    sequences, _ = numbered(5)

    samples = samples_of_steps(loaders(sequences), 5)

    assert np.bincount(samples)[::4].tolist() == [12] * 5


def test_seed_changes_the_order(numbered):
    sequences, _ = numbered(50)

    assert samples_of_steps(loaders(sequences, seed=1), 2) != samples_of_steps(loaders(sequences, seed=2), 2)


@pytest.mark.parametrize(("accumulation", "dp_size"), LAYOUTS)
def test_resume_mid_epoch_at_another_layout_goes_on_in_the_same_order(numbered, accumulation, dp_size):
    sequences, _ = numbered(50)
    expected = samples_of_steps(loaders(sequences), 8)
    before = loaders(sequences, 2, 2)
    samples = samples_of_steps(before, 3)

    after = loaders(sequences, accumulation, dp_size)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    samples += samples_of_steps(after, 5)

    assert sorted(samples[:36]) == sorted(expected[:36])
    assert samples == expected


def test_resume_with_another_batch_size_takes_up_the_next_sample(numbered):
    sequences, _ = numbered(50)
    (first,) = loaders(sequences)
    first.next_step()

    after = loaders(sequences, batch=4)
    after[0].load_state_dict(first.state_dict())

    assert samples_of_steps(after, 3) == samples_of_steps([first], 1)


def test_state_is_the_same_on_every_rank(numbered):
    ranks = loaders(numbered(50)[0], 1, 4)
    take_step(ranks)

    assert all(loader.state_dict() == ranks[0].state_dict() for loader in ranks)
    assert ranks[0].state_dict()["samples_consumed"] == BATCH


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 6}, "seed=5, but the checkpoint has 6 .from train.seed."),
        ({"num_samples": 49}, "num_samples=50, but the checkpoint has 49 .from data."),
        ({"sequence_length": 8}, "sequence_length=4, but the checkpoint has 8 .from data.sequence_length."),
    ],
)
def test_state_of_another_order_is_refused(numbered, other, named):
    (loader,) = loaders(numbered(50)[0])
    state = {**loader.state_dict(), "samples_consumed": 24, **other}

    with pytest.raises(ValueError, match=f"{named}; restore these values, or start over"):
        loader.load_state_dict(state)

    assert loader.samples_consumed == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 10, "dp_size": 4}, "global_batch_size=10 is not a multiple of"),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3"),
        ({"global_batch_size": 8, "dp_rank": 2, "dp_size": 2}, "dp_rank=2 is not one of the 2"),
    ],
)
def test_layout_that_does_not_fit_is_refused(numbered, settings, message):
    train, held_out = numbered(50, held_out_fraction=0.1)

    with pytest.raises(ValueError, match=message):
        TrainLoader(train, **settings)
    with pytest.raises(ValueError, match=message):
        HeldOutLoader(held_out, num_batches=1, **settings)


def test_nothing_to_train_on_is_refused(numbered):
    _, nothing = numbered(50)

    with pytest.raises(ValueError, match="no sequences to train on"):
        TrainLoader(nothing, global_batch_size=1)


@pytest.mark.parametrize(("accumulation", "dp_size"), LAYOUTS)
def test_held_out_batches_are_the_same_every_time_and_at_every_layout(numbered, accumulation, dp_size):
    _, held_out = numbered(1000, held_out_fraction=0.2)
    settings = {"num_batches": 3, "global_batch_size": BATCH}
    whole = torch.cat([batch.input_ids for batch in HeldOutLoader(held_out, **settings)])
    ranks = [
        HeldOutLoader(held_out, **settings, gradient_accumulation_steps=accumulation, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]

    for _ in range(2):
        batches = list(zip(*ranks, strict=True))
        assert len(batches) == len(ranks[0]) == 3 * accumulation
        assert torch.equal(torch.cat([batch.input_ids for step in batches for batch in step]), whole)


def test_held_out_samples_are_spread_over_the_whole_part(numbered):
    _, held_out = numbered(1000, held_out_fraction=0.2)

    inputs = torch.cat([batch.input_ids for batch in HeldOutLoader(held_out, num_batches=2, global_batch_size=10)])

    assert inputs[:, 0].tolist() == held_out.take(np.arange(0, 200, 10))[:, 0].tolist()


@pytest.mark.parametrize(("num_pieces", "num_batches"), [(1, 1), (7, 1), (8, 1), (15, 1), (16, 2), (40, 3)])
def test_small_held_out_part_gives_fewer_batches(numbered, num_pieces, num_batches):
    sequences, _ = numbered(num_pieces)

    batches = list(HeldOutLoader(sequences, num_batches=3, global_batch_size=8))

    assert len(batches) == num_batches
    assert all(batch.input_ids.shape == (8, 4) for batch in batches)


def test_nothing_held_out_gives_no_batches(numbered):
    _, nothing = numbered(50)
    loader = HeldOutLoader(nothing, num_batches=3, global_batch_size=8)

    assert len(loader) == 0
    assert list(loader) == []
