"""Stochastic rounding: right on average, equal on all replicas, and small updates are not lost."""

import pytest
import torch
from nxd_optim import StochasticRounding, stochastic_round
from nxd_state import get_group, initialize_model_parallel
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
    with pytest.raises(ValueError, match=r"float64; expected torch.float32"):
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


def test_stochastic_rounding_resumed_draws_what_it_would_have_drawn():
    def run(steps_before, steps_after):
        weight = nn.Parameter(torch.linspace(1, 2, 512).to(torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        rounding = StochasticRounding(optimizer, seed=3)
        for step in range(steps_before + steps_after):
            if step == steps_before:
                saved = rounding.state_dict()
                rounding.close()
                rounding = StochasticRounding(optimizer)
                rounding.load_state_dict(saved)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach()

    assert torch.equal(run(3, 3), run(6, 0))


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
