"""Several sources as one: shares by weight, every sample at least once, and an order that ranks do not change."""

from collections import Counter

import numpy as np
import pytest
import torch
from nxd_data import MixedSequences, TrainLoader, mix, read_weights


def drawn(sequences, count, **settings):
    """The first tokens of samples that a loader gives, in their order over all ranks."""
    loader = TrainLoader(sequences, global_batch_size=4, **settings)
    steps = [torch.cat([batch.input_ids for batch in loader.next_step()]) for _ in range(count // 4)]
    return torch.cat(steps)[:, 0].tolist()


@pytest.fixture
def parts(numbered):
    """Of 60 samples of four tokens and of 10, which are told apart by their first tokens."""
    first, second = numbered(60)[0], numbered(10)[0]
    return first, type(second)(second.tokens + 1000, 4, second.starts, second.lengths)


@pytest.mark.parametrize(("weights", "length"), [((0.5, 0.5), 120), ((0.9, 0.1), 100), ((1 / 7, 6 / 7), 420)])
def test_epoch_has_each_sample_at_least_once_and_shares_by_weight(parts, weights, length):
    mixed = mix(parts, weights)

    inputs, labels, positions = mixed.rows(np.arange(len(mixed)))

    assert len(mixed) == length
    times = Counter(inputs[:, 0].tolist())
    assert len(times) == 70
    of_second = sum(count for token, count in times.items() if token >= 1000)
    assert of_second == pytest.approx(weights[1] * length, abs=1)
    for own in ([times[4 * sample + start] for sample in range(count)] for start, count in ((0, 60), (1000, 10))):
        assert max(own) - min(own) <= 1
    np.testing.assert_array_equal(labels[:, :-1], inputs[:, 1:])
    np.testing.assert_array_equal(positions, np.broadcast_to(np.arange(4), inputs.shape))
    assert mixed.count(np.array([0, length - 1])) == (8, 8)


def test_source_without_a_sample_is_left_out(numbered, parts):
    empty = numbered(20, held_out_fraction=0.0)[1]

    assert mix([empty, parts[0]], [0.5, 0.5]) is parts[0]
    assert len(mix([empty, empty], [0.5, 0.5])) == 0
    assert isinstance(mix([*parts, empty], [0.4, 0.4, 0.2]), MixedSequences)


def test_order_of_a_mixture_does_not_depend_on_the_ranks(parts):
    mixed = mix(parts, (0.7, 0.3))

    alone = drawn(mixed, 48, seed=3)
    of_ranks = [drawn(mixed, 48, seed=3, dp_rank=rank, dp_size=2) for rank in range(2)]

    steps = [of_ranks[rank][step * 2 : step * 2 + 2] for step in range(12) for rank in range(2)]
    assert [token for step in steps for token in step] == alone
    assert drawn(mixed, 48, seed=4) != alone


def test_mixture_resumes_where_it_was(parts):
    mixed = mix(parts, (0.7, 0.3))
    whole, first = (TrainLoader(mixed, global_batch_size=4, seed=1) for _ in range(2))
    expected = [whole.next_step()[0].input_ids.tolist() for _ in range(6)]
    for _ in range(3):
        first.next_step()

    resumed = TrainLoader(mixed, global_batch_size=4, gradient_accumulation_steps=2, seed=1)
    resumed.load_state_dict(first.state_dict())

    found = [torch.cat([it.input_ids for it in resumed.next_step()]).tolist() for _ in range(3)]
    assert found == expected[3:]


def test_weights_are_numbers_above_zero():
    assert read_weights({"books": 3, "code": 0.5}) == {"books": 3.0, "code": 0.5}
    for weight in (0, -1, True, "much", [1], {"a.jsonl": 1}):
        with pytest.raises(ValueError, match=r"data\.sources: books has weight .*; expected a number above 0"):
            read_weights({"books": weight})
    with pytest.raises(ValueError, match=r"data\.sources is empty"):
        read_weights({})
