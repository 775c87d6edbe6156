"""The moving average of the weights, sharded over replicas, equals the one that one process keeps."""

import pytest
import torch
from nxd_optim import NeuronZero1Optimizer, WeightAverage
from nxd_state import get_group, initialize_model_parallel, set_shard_spec, shard_along
from torch import nn

SHAPES = [(3, 5), (7,), (), (1, 1)]
DECAY = 0.8


def parameters(dtype=torch.float64):
    return [nn.Parameter(torch.full(shape, 1.0, dtype=dtype)) for shape in SHAPES]


@torch.no_grad()
def move(weights, step):
    for index, weight in enumerate(weights):
        weight.copy_(torch.linspace(0, 1 + step + index, weight.numel(), dtype=weight.dtype).view(weight.shape))


def expected_average():
    weights = parameters()
    averages = [weight.detach().clone() for weight in weights]
    for step in range(4):
        move(weights, step)
        for average, weight in zip(averages, weights, strict=True):
            average.mul_(DECAY).add_(weight.detach(), alpha=1 - DECAY)
    return averages


@pytest.mark.parametrize("size", [1, 2, 4])
def test_weight_average_over_replicas_is_that_of_one_process(run_ranks, size):
    def job():
        initialize_model_parallel()
        weights = parameters()
        average = WeightAverage(weights, DECAY)
        for step in range(4):
            move(weights, step)
            average.update()
        with average.applied():
            inside = [weight.detach().clone() for weight in weights]
        return (
            inside,
            [weight.detach() for weight in weights],
            sum(shard.tensor.numel() for state in average.sharded_state() for shard in state.shards),
        )

    results = run_ranks(job, size)

    last = parameters()
    move(last, 3)
    for inside, after, _ in results:
        torch.testing.assert_close(inside, expected_average(), rtol=1e-12, atol=0)
        assert all(torch.equal(found, weight.detach()) for found, weight in zip(after, last, strict=True))
    assert sum(held for _, _, held in results) == 3 * 5 + 7 + 1 + 1  # each element has one owner


def test_weight_average_of_bfloat16_weights_is_kept_in_float32():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = WeightAverage([weight], 0.999)
    weight.data.fill_(2.0)

    average.update()

    ((state,),) = ([average.sharded_state()[0].shards],)
    torch.testing.assert_close(state[0].tensor, torch.full((3,), 1.001), rtol=1e-6, atol=0)


def test_restart_takes_the_current_weights():
    weight = nn.Parameter(torch.zeros(2))
    average = WeightAverage([weight], 0.5)
    weight.data.fill_(4.0)

    average.restart()
    average.update()

    with average.applied():
        assert weight.tolist() == [4.0, 4.0]


def test_weight_average_is_restored_after_an_exception():
    weight = nn.Parameter(torch.zeros(2))
    average = WeightAverage([weight], 0.5)
    weight.data.fill_(4.0)

    with pytest.raises(KeyError), average.applied():
        raise KeyError

    assert weight.tolist() == [4.0, 4.0]


def test_weight_average_of_shards_knows_their_place_in_the_logical_tensor(run_ranks):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        weight = nn.Parameter(torch.zeros(2, 3))
        set_shard_spec(weight, shard_along((4, 3), 0, rank=get_group("tp").rank, size=2))
        (state,) = WeightAverage([weight], 0.5).sharded_state()
        return [(shard.logical_shape, shard.box.offset, shard.box.shape) for shard in state.shards]

    assert run_ranks(job, 2) == [[((4, 3), (0, 0), (2, 3))], [((4, 3), (2, 0), (2, 3))]]


def test_weight_average_waits_for_parameters_that_overlap_the_next_forward(run_ranks):
    def job():
        initialize_model_parallel()
        model = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, grad_clipping=False, lr=1.0)
        optimizer.overlap_forward(model)
        average = WeightAverage(model.parameters(), 0.5, optimizer=optimizer)
        waits = []
        wait = optimizer.wait_for_parameters
        model.weight.grad = torch.ones(4, 4)
        optimizer.step()
        optimizer.wait_for_parameters = lambda: (waits.append("waited"), wait())
        average.update()
        assert waits == ["waited"]
        with average.applied():
            return model.weight.detach().clone()

    for weight in run_ranks(job, 2):
        assert torch.equal(weight, torch.full((4, 4), -0.5))


@pytest.mark.parametrize("decay", [0.0, 1.0, -1, 2])
def test_weight_average_with_a_decay_that_averages_nothing_raises(decay):
    with pytest.raises(ValueError, match="between 0 and 1"):
        WeightAverage([], decay)
