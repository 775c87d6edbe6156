"""Stochastic rounding: right on average, equal on all replicas, and small updates are not lost."""

import pytest
import torch
from nxd_optim import NeuronZero1Optimizer, StochasticRounding, stochastic_round
from nxd_state import get_group, initialize_model_parallel, set_shard_spec, shard_along
from torch import nn


def test_stochastic_round_gives_one_of_the_two_neighbours():
    values = torch.randn(1000)

    rounded = stochastic_round(values).float()

    spacing = 2.0 ** (values.abs().log2().floor() - 7)  # bfloat16 has 8 significant bits
    assert ((rounded - values).abs() < spacing).all()


def test_stochastic_round_is_unbiased():
    value = 1 + 0.3 * 2**-7  # 0.3 of the way from 1 to its upper neighbour
    draws = torch.full((100_000,), value)

    rounded_up = (stochastic_round(draws, torch.Generator().manual_seed(0)) > 1).float().mean()

    assert rounded_up.item() == pytest.approx(0.3, abs=0.01)
    assert stochastic_round(-draws, torch.Generator().manual_seed(0)).float().mean().item() == pytest.approx(
        -value, abs=1e-4
    )


def test_stochastic_round_keeps_what_bfloat16_can_hold_and_what_is_not_finite():
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf")])
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)

    assert torch.equal(stochastic_round(exact), exact.to(torch.bfloat16))
    assert stochastic_round(nan).isnan().all()


def test_stochastic_round_of_another_dtype_raises():
    with pytest.raises(ValueError, match=r"float64 stochastically; expected torch.float32"):
        stochastic_round(torch.zeros(1, dtype=torch.float64))


def small_updates(rounding):
    """The mean of weights that begin at 1 and are lowered a hundred times by a hundredth of their spacing."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=2**-7 / 100)
    if rounding:
        StochasticRounding(optimizer)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.float().mean().item()


def test_stochastic_rounding_keeps_updates_that_rounding_to_nearest_loses():
    assert small_updates(rounding=False) == 1.0
    assert small_updates(rounding=True) == pytest.approx(1 - 2**-7, abs=1e-3)


def test_stochastic_rounding_leaves_parameter_and_gradient_as_they_were_but_for_the_update():
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    other = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight, other], lr=0.1)
    StochasticRounding(optimizer)
    weight.grad, other.grad = torch.ones_like(weight), torch.ones_like(other)
    memory, gradient = weight.data_ptr(), weight.grad

    optimizer.step()

    assert (weight.data_ptr(), weight.dtype) == (memory, torch.bfloat16)
    assert weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(weight))
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    assert (weight < 1).all()
    assert (other < 1).all()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def zero1(parameters):
    return NeuronZero1Optimizer(parameters, torch.optim.AdamW, torch.bfloat16, lr=1e-3)


@pytest.mark.parametrize("make_optimizer", [adamw, zero1])
def test_stochastic_rounding_resumed_gives_the_weights_of_a_run_that_never_stopped(make_optimizer):
    def run(steps_before, steps_after):
        weight = nn.Parameter(torch.linspace(1, 2, 512).to(torch.bfloat16))
        optimizer = make_optimizer([weight])
        rounding = StochasticRounding(optimizer, seed=3)
        for step in range(steps_before + steps_after):
            if step == steps_before:
                saved, state = rounding.state_dict(), optimizer.state_dict()
                weight = nn.Parameter(weight.detach().clone())
                optimizer = make_optimizer([weight])
                rounding = StochasticRounding(optimizer)
                optimizer.load_state_dict(state)
                rounding.load_state_dict(saved)
            weight.grad = torch.linspace(-1, 1.1, 512).mul(step + 1).to(torch.bfloat16)
            optimizer.step()
        return weight.detach()

    assert torch.equal(run(3, 3), run(6, 0))


@pytest.mark.parametrize("size", [1, 2])
def test_stochastic_rounding_inside_zero1_keeps_small_updates(run_ranks, size):
    def job():
        initialize_model_parallel()
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = NeuronZero1Optimizer([weight], torch.optim.SGD, torch.bfloat16, grad_clipping=False, lr=2**-7 / 100)
        StochasticRounding(optimizer)
        for _ in range(100):
            with optimizer.overlap_backward():
                weight.float().sum().backward()
            optimizer.step()
        return weight.detach()

    first, *others = run_ranks(job, size)

    assert first.float().mean().item() == pytest.approx(1 - 2**-7, abs=1e-3)
    assert all(torch.equal(first, other) for other in others)


def test_stochastic_rounding_of_master_weights_raises():
    optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], torch.optim.SGD, lr=1.0)

    with pytest.raises(ValueError, match="updates master weights"):
        StochasticRounding(optimizer)


def test_stochastic_rounding_is_bitwise_equal_on_all_ranks(run_ranks):
    def train():
        initialize_model_parallel(tensor_model_parallel_size=2)
        torch.manual_seed(get_group("tp").rank)  # ranks whose own random streams differ
        weight = nn.Parameter(torch.linspace(1, 2, 512).to(torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        StochasticRounding(optimizer)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach()

    first, second = run_ranks(train, 2)

    assert torch.equal(first, second)


def rounded_shards(tp, zero1):
    """This rank's rows of two equal weights after three steps, with updates that are the same at any layout."""
    initialize_model_parallel(tensor_model_parallel_size=tp)
    rank = get_group("tp").rank
    whole = torch.linspace(1, 2, 64 * 8).view(64, 8).to(torch.bfloat16)
    weights = [nn.Parameter(whole.chunk(tp)[rank].clone()) for _ in range(2)]
    for weight in weights:
        set_shard_spec(weight, shard_along((64, 8), 0, rank=rank, size=tp))
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    if zero1:
        cap = 0.0002  # a bucket for each weight
        optimizer = NeuronZero1Optimizer(
            weights,
            torch.optim.SGD,
            torch.bfloat16,
            grad_clipping=False,
            bucket_cap_mb_reduce_scatter=cap,
            lr=1e-3,
        )
    StochasticRounding(optimizer, names=dict(zip(weights, ("first", "second"), strict=True)))
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize(("world", "tp", "zero1"), [(2, 2, False), (2, 1, True), (4, 2, True)])
def test_noise_of_an_element_is_the_same_at_any_layout_and_differs_between_weights(run_ranks, world, tp, zero1):
    [expected] = run_ranks(rounded_shards, 1, 1, False)
    assert not torch.equal(*expected)

    ranks = run_ranks(rounded_shards, world, tp, zero1)

    for index, weight in enumerate(expected):
        for rank, shards in enumerate(ranks):
            assert torch.equal(shards[index], weight.chunk(tp)[rank % tp])
