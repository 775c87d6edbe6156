import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_data.loader import shuffled


@settings(deadline=None)
@given(num_samples=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_epoch_holds_every_sample_once(num_samples, seed, epoch):
    order = shuffled(np.arange(num_samples), num_samples, seed=seed, epoch=epoch)

    assert sorted(order.tolist()) == list(range(num_samples))


@settings(deadline=None)  # a range of 1 walks through many numbers outside it
@given(num_samples=st.integers(1, 10**12), data=st.data())
def test_position_gives_the_same_sample_alone_and_among_others(num_samples, data):
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=9)))

    together = shuffled(positions, num_samples, seed=1, epoch=2)
    alone = [shuffled(positions[i : i + 1], num_samples, seed=1, epoch=2)[0] for i in range(len(positions))]

    assert together.tolist() == alone
    assert ((together >= 0) & (together < num_samples)).all()


def test_order_is_this_one_for_ever():
    order = shuffled(np.arange(10), 10, seed=1, epoch=0)

    assert order.tolist() == [5, 1, 6, 7, 9, 8, 2, 3, 4, 0]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0), (-1, 0)])
def test_seed_and_epoch_each_give_another_order(seed, epoch):
    base = shuffled(np.arange(1000), 1000, seed=0, epoch=0)
    other = shuffled(np.arange(1000), 1000, seed=seed, epoch=epoch)

    assert (base == other).sum() < 20


@pytest.mark.parametrize("num_samples", [100, 1000, 65536, 100_003])
def test_order_looks_random(num_samples):
    positions = np.arange(num_samples)
    orders = [shuffled(positions, num_samples, seed=seed, epoch=0) for seed in range(20)]

    correlations = [np.corrcoef(positions, order)[0, 1] for order in orders]
    steps = [np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders]

    assert max(map(abs, correlations + steps)) < 5 / np.sqrt(num_samples)


def test_each_sample_comes_equally_often_at_each_position():
    counts = np.zeros((8, 8))
    for seed in range(1000):
        counts[np.arange(8), shuffled(np.arange(8), 8, seed=seed, epoch=0)] += 1

    assert np.abs(counts - 125).max() < 5 * np.sqrt(125)
