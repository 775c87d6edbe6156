"""The documented mixed_precision_config, and loss scaling: scale, skip, grow, and the same decision on all ranks."""

import pytest
import torch
from nxd_optim import GradientReducer, LossScaler, NeuronZero1Optimizer, resolve_mixed_precision
from nxd_state import get_group, initialize_model_parallel
from torch import nn


@pytest.mark.parametrize("zero_one_enabled", [False, True])
def test_mixed_precision_defaults_come_with_zero1(zero_one_enabled):
    resolved = resolve_mixed_precision(None, zero_one_enabled=zero_one_enabled)

    assert resolved.use_master_weights is zero_one_enabled
    assert resolved.use_fp32_grad_acc is zero_one_enabled
    assert resolved.use_master_weights_in_ckpt is False


def test_mixed_precision_given_values_win_and_the_config_stays_as_it_was():
    config = {"use_master_weights": True, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": True}
    before = dict(config)

    arguments = resolve_mixed_precision(config, zero_one_enabled=True).zero1_arguments(torch.bfloat16)

    assert arguments == {
        "optimizer_dtype": None,  # float32 or wider
        "use_grad_acc_hook": False,
        "higher_cc_precision": False,
        "save_master_weights": True,
    }
    assert config == before


def test_stochastic_rounding_replaces_master_weights_and_refuses_them():
    assert not resolve_mixed_precision({"use_stochastic_rounding": True}, zero_one_enabled=True).use_master_weights
    with pytest.raises(ValueError, match="use_stochastic_rounding=True replaces master weights"):
        resolve_mixed_precision({"use_stochastic_rounding": True, "use_master_weights": True}, zero_one_enabled=True)


def test_mixed_precision_without_zero1_raises_for_both_keys():
    config = {"use_master_weights": True, "use_fp32_grad_acc": True}

    with pytest.raises(ValueError, match=r"use_master_weights=True needs .*; use_fp32_grad_acc=True needs"):
        resolve_mixed_precision(config, zero_one_enabled=False)


def test_mixed_precision_mistakes_are_named_at_once():
    config = {"use_master_weight": True, "use_fp32_grad_acc": "yes", "use_master_weights_in_ckpt": True}

    with pytest.raises(ValueError, match="mixed_precision_config: ") as raised:
        resolve_mixed_precision({**config, "use_master_weights": False}, zero_one_enabled=True)

    for mistake in (
        "did you mean 'use_master_weights'",
        "'yes' must be True",
        "needs use_master_weights=True",
    ):
        assert mistake in str(raised.value)


def test_mixed_precision_without_master_weights_updates_parameters_in_their_own_dtype():
    resolved = resolve_mixed_precision({"use_master_weights": False}, zero_one_enabled=True)

    assert resolved.zero1_arguments(torch.bfloat16)["optimizer_dtype"] == torch.bfloat16


def train(make_optimizer, *, scaler=None, steps=3, dtype=torch.float32, overflow_at=None):
    """Weights after some steps of a tiny regression; an overflow comes on one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(dtype)
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        loss = (model(torch.linspace(-1, 1, 12).view(3, 4).to(dtype)).float() - 0.3 * step).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if step == overflow_at:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer) if scaler else optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def zero1(parameters):
    return NeuronZero1Optimizer(parameters, torch.optim.AdamW, grad_clipping=False, lr=0.1)


@pytest.mark.parametrize("make_optimizer", [adamw, zero1])
def test_scaled_training_gives_the_weights_of_unscaled_training(make_optimizer):
    scaled = train(make_optimizer, scaler=LossScaler(initial_scale=1024.0))

    torch.testing.assert_close(scaled, train(make_optimizer), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make_optimizer", [adamw, zero1])
def test_step_with_overflow_is_left_out_and_halves_the_scale(make_optimizer):
    scaler = LossScaler(initial_scale=1024.0)

    weights = train(make_optimizer, scaler=scaler, steps=1, overflow_at=0)

    torch.manual_seed(0)
    assert all(torch.equal(found, start) for found, start in zip(weights, nn.Linear(4, 2).parameters(), strict=True))
    assert (scaler.scale_factor, scaler.skipped_steps) == (512.0, 1)


def test_zero1_trains_float16_parameters_whose_unscaled_gradients_would_vanish():
    def run(scaler):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD, grad_clipping=True, max_norm=1e9, lr=1e8)
        loss = parameter.float().sum() * 1e-9  # its gradient is below float16's smallest number
        (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(optimizer) if scaler else optimizer.step()
        return parameter.detach(), optimizer.grad_norm

    (scaled, norm), (unscaled, _) = run(LossScaler(initial_scale=2.0**20)), run(None)

    torch.testing.assert_close(scaled, torch.full((4,), 0.9, dtype=torch.float16), rtol=1e-2, atol=0)
    assert norm.item() == pytest.approx(2e-9, rel=0.05)
    assert torch.equal(unscaled, torch.ones(4, dtype=torch.float16))


def test_scale_grows_after_an_interval_without_overflow():
    scaler = LossScaler(initial_scale=8.0, growth_interval=2)

    train(adamw, scaler=scaler, steps=5)

    assert scaler.scale_factor == 32.0


def test_resumed_scaler_goes_on_where_it_was():
    scaler, resumed = LossScaler(initial_scale=8.0, growth_interval=3), LossScaler(growth_interval=3)
    train(adamw, scaler=scaler, steps=2)

    resumed.load_state_dict(scaler.state_dict())
    train(adamw, scaler=resumed, steps=1)

    assert resumed.scale_factor == 16.0


def test_unscale_before_the_step_lets_gradients_be_clipped():
    parameter = nn.Parameter(torch.zeros(2))
    scaler = LossScaler(initial_scale=64.0)
    scaler.scale(parameter.sum() * 3).backward()

    assert scaler.unscale_([parameter])
    assert parameter.grad.tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="already unscaled"):
        scaler.unscale_([parameter])


def test_unscale_of_float16_gradients_raises():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)

    with pytest.raises(ValueError, match="float16 gradients vanish"):
        LossScaler().unscale_([parameter])


@pytest.mark.parametrize("setting", [{"initial_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_scaler_that_would_not_scale_raises(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        LossScaler(**setting)


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_overflow_on_one_rank_is_left_out_by_all(run_ranks, axis):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2 if axis == "tp" else 1)
        parameter = nn.Parameter(torch.ones(3))
        reducer, scaler = GradientReducer([parameter]), LossScaler(initial_scale=4.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(parameter.sum()).backward()
        if get_group(axis).rank == 1:
            parameter.grad[0] = float("nan")
        reducer.finish()
        taken = scaler.step(optimizer)
        return taken, parameter.tolist(), scaler.scale_factor

    assert run_ranks(job, 2) == [(False, [1.0] * 3, 2.0)] * 2


def test_gradients_that_are_never_finite_raise_in_the_end():
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), LossScaler()

    def train():
        for _ in range(50):
            parameter.grad = torch.tensor([float("nan")])
            scaler.step(optimizer)

    with pytest.raises(RuntimeError, match="loss or weights are not finite"):
        train()
    assert parameter.item() == 1.0


def test_scaler_and_reducer_on_several_ranks_without_a_mesh_raise(run_ranks):
    def job():
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        with pytest.raises(RuntimeError, match=r"there is no mesh.* call nxd_state.initialize_model_parallel"):
            LossScaler().unscale_([parameter])
        with pytest.raises(RuntimeError, match="2 ranks, but there is no mesh"):
            GradientReducer([parameter])

    run_ranks(job, 2)


def test_scaler_leaves_the_settings_of_zero1_as_they_were():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = zero1([parameter])
    parameter.grad = torch.ones(1)

    LossScaler().step(optimizer)

    assert (optimizer.loss_scale, optimizer.skip_non_finite_steps) == (1.0, False)
