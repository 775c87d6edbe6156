"""Batches on the device ahead of their steps. (That a run resumes with the next batch: tests-integration/training.)"""

import itertools
import threading

import pytest
import torch
from nxd_data import PackedSequences, TrainBatches, TrainLoader

BATCH = 6


@pytest.fixture
def make_loader(numbered):
    sequences, _ = numbered(50)

    def make() -> TrainLoader:
        return TrainLoader(sequences, global_batch_size=BATCH, gradient_accumulation_steps=2, seed=3)

    return make


@pytest.fixture
def loader(make_loader):
    return make_loader()


@pytest.fixture
def batches(loader):
    batches = TrainBatches(loader)
    yield batches
    batches.close()


def assert_same(found, expected):
    """`found` is a step's batch, `expected` its microbatches."""
    assert len(expected) == 2
    assert torch.equal(found.input_ids, torch.cat([batch.input_ids for batch in expected]))
    assert torch.equal(found.labels, torch.cat([batch.labels for batch in expected]))


def test_steps_are_those_of_the_loader_over_epochs(batches, make_loader):
    expected = make_loader()

    for _ in range(20):
        assert_same(batches.next_step(), expected.next_step())


def test_position_is_that_of_the_steps_taken(batches, loader, make_loader):
    for _ in range(3):
        batches.next_step()

    assert loader.samples_consumed == 3 * BATCH
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert torch.equal(TrainBatches(resumed).next_step().input_ids, batches.next_step().input_ids)


def test_closing_ends_the_thread_and_drops_only_what_was_made_ahead(batches, make_loader):
    expected, before = make_loader(), threading.active_count()
    assert_same(batches.next_step(), expected.next_step())

    batches.close()

    assert threading.active_count() == before
    assert_same(batches.next_step(), expected.next_step())


class DamagedSequences(PackedSequences):
    """They can be read twice."""

    readings = itertools.count()

    def take(self, samples):
        if next(self.readings) >= 2:
            raise OSError("the tokens are damaged")
        return super().take(samples)


def test_error_of_the_data_is_raised_by_its_step_and_the_position_stays_before_it(numbered):
    sequences, _ = numbered(50)
    loader = TrainLoader(DamagedSequences(**vars(sequences)), global_batch_size=BATCH)
    batches = TrainBatches(loader)

    batches.next_step()
    batches.next_step()
    with pytest.raises(OSError, match="the tokens are damaged"):
        batches.next_step()

    assert loader.samples_consumed == 2 * BATCH
