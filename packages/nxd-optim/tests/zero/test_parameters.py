"""Frozen, unused, tied, sparse and later added parameters; and what may not happen to parameters."""

import copy

import pytest
import torch
from nxd_optim.zero import NeuronZero1Optimizer
from nxd_state import active_group, initialize_model_parallel
from torch import nn

WEIGHT_DECAY = {"lr": 0.1, "weight_decay": 0.5}


def named(**values):
    return {name: nn.Parameter(torch.tensor(value, dtype=torch.float64)) for name, value in values.items()}


def values(parameters):
    return {name: p.detach().tolist() for name, p in parameters.items()}


def test_parameter_without_a_gradient_on_any_rank_is_left_alone(run_ranks):
    def train():
        initialize_model_parallel()
        parameters = named(used=[1.0, 2.0, 3.0], unused=[4.0, 5.0], now_and_then=[6.0])
        optimizer = NeuronZero1Optimizer(parameters.values(), torch.optim.AdamW, grad_clipping=False, **WEIGHT_DECAY)
        for step in range(4):
            loss = parameters["used"].square().sum()
            if step % 2:
                loss = loss + parameters["now_and_then"].sum()
            with optimizer.overlap_backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(parameters)

    results = run_ranks(train, 2)

    parameters = named(used=[1.0, 2.0, 3.0], unused=[4.0, 5.0], now_and_then=[6.0])
    expected = torch.optim.AdamW(parameters.values(), **WEIGHT_DECAY)
    for step in range(4):
        parameters["used"].square().sum().backward()
        if step % 2:
            parameters["now_and_then"].sum().backward()
        expected.step()
        expected.zero_grad()
    for found in results:
        assert found == {name: pytest.approx(value, rel=1e-12) for name, value in values(parameters).items()}
        assert found["unused"] == [4.0, 5.0]


def test_parameter_with_a_gradient_on_one_rank_counts_as_zero_on_the_others(run_ranks):
    def train():
        initialize_model_parallel()
        parameters = named(first=[1.0], second=[1.0])
        optimizer = NeuronZero1Optimizer(parameters.values(), torch.optim.SGD, grad_clipping=False, lr=1.0)
        parameters["first" if active_group("dp").rank == 0 else "second"].sum().backward()
        optimizer.step()
        return values(parameters)

    assert run_ranks(train, 2) == [{"first": [0.5], "second": [0.5]}] * 2


def test_base_optimizer_shows_this_ranks_elements_and_their_state(run_ranks):
    def train():
        initialize_model_parallel()
        parameters = named(matrix=[[1.0, 2.0], [3.0, 4.0]], bias=[5.0], frozen=[6.0])
        parameters["frozen"].requires_grad_(False)
        groups = [{"params": [parameters["matrix"]], "lr": 0.5}, {"params": [parameters["bias"], parameters["frozen"]]}]
        optimizer = NeuronZero1Optimizer(groups, torch.optim.AdamW, grad_clipping=False, lr=0.1)
        (parameters["matrix"].sum() + parameters["bias"].sum()).backward()
        optimizer.step()
        optimizer.param_groups[1]["lr"] = 0.3
        base = optimizer.base_optimizer
        shown = [[p.tolist() for p in group["params"]] for group in base.param_groups]
        steps = [state["step"].item() for state in base.state.values()]
        rates = [group["lr"] for group in base.param_groups]
        return isinstance(base, torch.optim.AdamW), rates, shown, steps, values(parameters)

    first, second = run_ranks(train, 2)

    trained = first[-1]
    assert first[:2] == second[:2] == (True, [0.5, 0.3])
    assert first[2][0][0] + second[2][0][0] == [*trained["matrix"][0], *trained["matrix"][1]]
    assert first[2][1][0] + second[2][1][0] == trained["bias"]
    assert first[2][1][1] == second[2][1][1] == []  # frozen
    assert first[3] + second[3] == [1.0] * 3  # the matrix on both ranks, the bias on one


def test_frozen_and_tied_parameters_train_as_without_zero1(run_ranks):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)).double()
        model[2].weight = model[0].weight
        model[1].weight.requires_grad_(False)
        return model

    def loss_of(model, samples):
        ids = torch.arange(8)[samples]
        return nn.functional.cross_entropy(model(ids % 7), (ids * 3) % 7)

    def train():
        initialize_model_parallel()
        model, dp = make(), active_group("dp")
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, grad_clipping=False, **WEIGHT_DECAY)
        for _ in range(5):
            with optimizer.overlap_backward():
                loss_of(model, slice(dp.rank, None, dp.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[2].weight is model[0].weight
        return model.state_dict()

    results = run_ranks(train, 4)

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), **WEIGHT_DECAY)
    for _ in range(5):
        loss_of(model, slice(None)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in results:
        torch.testing.assert_close(found, model.state_dict(), rtol=1e-12, atol=1e-14)


def test_sparse_and_assigned_gradients_are_taken(run_ranks):
    def train():
        initialize_model_parallel()
        table = nn.Embedding(3, 2, sparse=True).double()
        nn.init.zeros_(table.weight)
        other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = NeuronZero1Optimizer([table.weight, other], torch.optim.SGD, grad_clipping=False, lr=1.0)
        table(torch.tensor([active_group("dp").rank])).sum().backward()
        other.grad = torch.tensor([2.0, 4.0], dtype=torch.float64)
        optimizer.step()
        return table.weight.tolist(), other.tolist()

    assert run_ranks(train, 2) == [([[-0.5, -0.5], [-0.5, -0.5], [0.0, 0.0]], [-2.0, -4.0])] * 2


def test_parameters_added_later_train_with_their_own_settings(run_ranks):
    def train():
        initialize_model_parallel()
        parameters = named(first=[1.0, 2.0, 3.0], second=[4.0, 5.0])
        optimizer = NeuronZero1Optimizer([parameters["first"]], torch.optim.AdamW, grad_clipping=False, **WEIGHT_DECAY)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [parameters["second"]], "lr": 0.3})
            sum(p.square().sum() for p in parameters.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
            parameters["second"].grad = None
        return values(parameters), [group["lr"] for group in optimizer.param_groups]

    results = run_ranks(train, 2)

    parameters = named(first=[1.0, 2.0, 3.0], second=[4.0, 5.0])
    optimizer = torch.optim.AdamW([parameters["first"]], **WEIGHT_DECAY)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [parameters["second"]], "lr": 0.3})
        parameters["second"].grad = None
        sum(p.square().sum() for p in parameters.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, rates in results:
        assert rates == [0.1, 0.3]
        assert found == {name: pytest.approx(value, rel=1e-12) for name, value in values(parameters).items()}


def test_state_is_one_part_of_the_elements_and_parameters_share_one_buffer(run_ranks):
    def measure():
        initialize_model_parallel()
        parameters = [nn.Parameter(torch.randn(size)) for size in (1009, 3, 509, 127)]
        optimizer = NeuronZero1Optimizer(parameters, torch.optim.AdamW)
        sum(p.square().sum() for p in parameters).backward()
        optimizer.step()
        states = [s for entry in optimizer.state_dict()["state"].values() for s in entry.values() if s.dim()]
        return sum(s.numel() for s in states), len({p.untyped_storage().data_ptr() for p in parameters})

    results = run_ranks(measure, 4)

    assert sum(elements for elements, _ in results) == 2 * (1009 + 3 + 509 + 127)
    assert max(elements for elements, _ in results) <= 1.01 * 2 * (1009 + 3 + 509 + 127) / 4
    assert [storages for _, storages in results] == [1] * 4


def test_ranks_with_different_parameters_raise_on_all(run_ranks):
    def make():
        initialize_model_parallel()
        size = 3 if active_group("dp").rank == 0 else 4
        with pytest.raises(ValueError, match="rank 1 passed 1 parameters of 4 elements, rank 0 passed 1 of 3"):
            NeuronZero1Optimizer([nn.Parameter(torch.ones(size))], torch.optim.AdamW)

    run_ranks(make, 2)


def test_parameter_that_was_moved_after_the_optimizer_was_made_raises():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.AdamW)
    parameter.data = parameter.data.clone()
    parameter.sum().backward()

    with pytest.raises(RuntimeError, match=r"parameter of shape \(3,\) was moved after the optimizer was created"):
        optimizer.step()


def test_frozen_parameter_that_gets_a_gradient_raises_and_says_what_to_do():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = NeuronZero1Optimizer([first, second], torch.optim.AdamW)
    second.requires_grad_(True)
    (first.sum() + second.sum()).backward()

    with pytest.raises(RuntimeError, match=r"shape \(2,\) was frozen .* call add_param_group"):
        optimizer.step()


def test_optimizer_without_trained_parameters_changes_nothing():
    parameter = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.AdamW)

    optimizer.step()
    optimizer.zero_grad()

    assert parameter.tolist() == [1.0] * 3
    assert float(optimizer.grad_norm) == 0.0


def test_parameters_on_the_meta_device_raise_unless_materialised_first():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="parameters on the meta device cannot be trained; materialize them"):
        NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lazy_init=True, grad_clipping=False, lr=1.0)
    with pytest.raises(RuntimeError, match=r"lazy_init=True; call init_zero\(\) first"):
        optimizer.step()
    weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    optimizer.param_groups[0]["params"] = weights

    optimizer.init_zero()

    weights[0].sum().backward()
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[[0.0, 0.0]] * 2, [1.0, 1.0]]


def test_settings_of_groups_may_be_changed_between_steps_as_in_torch():
    parameters = named(first=[1.0], second=[1.0])
    twin = copy.deepcopy(parameters)
    groups = [{"params": [p]} for p in parameters.values()]
    optimizer = NeuronZero1Optimizer(groups, torch.optim.AdamW, grad_clipping=False, lr=0.1)
    expected = torch.optim.AdamW([{"params": [p]} for p in twin.values()], lr=0.1)
    for step in range(3):
        for each, weights in ((optimizer, parameters), (expected, twin)):
            each.param_groups[1]["lr"] = 0.3 * step
            each.param_groups[0]["betas"] = (0.5, 0.9)
            sum(p.square().sum() for p in weights.values()).backward()
            each.step()
            each.zero_grad()

    assert values(parameters) == {name: pytest.approx(value, rel=1e-12) for name, value in values(twin).items()}
