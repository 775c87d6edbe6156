"""`NxDOptimizer`: an ordinary optimizer to schedulers, hooks and scripts, with gradients reduced and clipped."""

import copy
import inspect

import pytest
import torch
from nxd_engine import initialize_parallel_optimizer, neuronx_distributed_config
from nxd_optim import NeuronZero1Optimizer
from torch import nn
from torch.optim import SGD, AdamW


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 3)).square().sum().backward()


def make(model: nn.Module, optimizer_class=AdamW, options=None, **defaults):
    config = neuronx_distributed_config(optimizer_config=options)
    return initialize_parallel_optimizer(config, optimizer_class, model.parameters(), **defaults)


pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.sample(9)]  # each takes its time


@pytest.mark.parametrize("zero1", [False, True])
def test_grad_norm_is_that_before_clipping_and_none_before_a_step(model, zero1):
    optimizer = make(model, SGD, {"zero_one_enabled": zero1, "max_grad_norm": 0.1}, lr=1.0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert optimizer.grad_norm is None

    backward(model)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    optimizer.step()

    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert optimizer.grad_norm.item() == pytest.approx(norm.item())
    assert (after - before).norm().item() == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("zero1", [False, True])
def test_without_clipping_there_is_no_norm_and_the_whole_gradient_is_applied(model, zero1):
    optimizer = make(model, SGD, {"zero_one_enabled": zero1, "grad_clipping": False}, lr=1.0)
    before = model.weight.detach().clone()

    backward(model)
    gradient = model.weight.grad.clone()
    optimizer.step()

    assert optimizer.grad_norm is None
    torch.testing.assert_close(model.weight.detach(), before - gradient)


@pytest.mark.parametrize("zero1", [False, True])
def test_schedulers_hooks_and_groups_work_on_it_as_on_any_optimizer(model, zero1):
    config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1})
    groups = [
        {"params": [model.weight], "weight_decay": 0.1},
        {"params": (p for p in [model.bias]), "weight_decay": 0.0},
    ]
    optimizer = initialize_parallel_optimizer(config, AdamW, groups, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    backward(model)
    optimizer.step()
    scheduler.step()

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.05)] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.defaults["lr"] == 0.5
    assert steps == [1]
    assert isinstance(optimizer.optimizer, NeuronZero1Optimizer) == zero1


def test_state_dict_is_the_plain_optimizers_and_goes_into_another(model):
    optimizer = make(model, lr=0.1)
    plain_model = nn.Linear(3, 2)
    plain_model.load_state_dict(model.state_dict())
    plain = AdamW(plain_model.parameters(), lr=0.1)
    for own, its_model in ((optimizer, model), (plain, plain_model)):
        backward(its_model)
        nn.utils.clip_grad_norm_(its_model.parameters(), 1.0)
        own.step()
        own.zero_grad()

    plain.load_state_dict(optimizer.state_dict())

    state, loaded = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert state.keys() == loaded.keys()
    for index, values in state.items():
        assert all(torch.equal(values[key], loaded[index][key]) for key in values)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_closure_is_called_once_and_its_loss_returned(model):
    optimizer = make(model, lr=0.1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        backward(model)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert calls == [True]


def test_added_group_is_trained_as_well(model):
    more = nn.Linear(2, 1)
    optimizer = make(model, SGD, lr=0.1)
    optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.2})
    before = more.weight.detach().clone()

    more(model(torch.ones(1, 3))).sum().backward()
    optimizer.step()

    assert not torch.equal(more.weight, before)


def test_what_is_no_optimizer_class_and_no_parameters_are_refused(model):
    config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": True})

    with pytest.raises(ValueError, match="optimizer_class='AdamW' must be a torch optimizer class"):
        initialize_parallel_optimizer(config, "AdamW", model.parameters())
    with pytest.raises(ValueError, match="no parameters are given"):
        initialize_parallel_optimizer(config, AdamW, [])
    with pytest.raises(ValueError, match="a parameter group has no 'params', only 'lr'"):
        initialize_parallel_optimizer(config, AdamW, [{"lr": 0.1}])


def test_parameter_without_gradient_on_any_replica_is_left_alone_and_on_some_is_averaged(run_ranks):
    def run():
        config = neuronx_distributed_config(optimizer_config={"grad_clipping": False})
        rank = torch.distributed.get_rank()
        used, sometimes, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
        optimizer = initialize_parallel_optimizer(config, AdamW, [used, sometimes, unused], lr=0.1, weight_decay=0.5)
        plain = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        expected = AdamW(plain, lr=0.1, weight_decay=0.5)
        for _ in range(2):
            loss = used.sum() * (rank + 1) + (sometimes.sum() if rank == 0 else 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plain[0].grad, plain[1].grad = torch.full((2,), 1.5), torch.full((2,), 0.5)
            expected.step()
        return torch.equal(used, plain[0]), torch.equal(sometimes, plain[1]), unused.tolist()

    assert run_ranks(run, 2) == [(True, True, [1.0, 1.0])] * 2


@pytest.mark.parametrize("zero1", [False, True])
def test_empty_groups_are_kept_and_the_callers_groups_left_alone(model, zero1):
    config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1})
    groups = [{"params": []}, {"params": list(model.parameters()), "lr": 0.2}]  # as a stage without embeddings has

    optimizer = initialize_parallel_optimizer(config, SGD, groups, lr=0.1)
    backward(model)
    optimizer.step()

    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [group.keys() - {"params"} for group in groups] == [set(), {"lr"}]
    nothing = initialize_parallel_optimizer(config, SGD, [{"params": []}], lr=0.1)
    nothing.step()


def test_optimizer_that_one_rank_cannot_make_is_an_error_on_all(run_ranks):
    def run():
        rank = torch.distributed.get_rank()
        found = []
        for zero1 in (False, True):
            config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1})
            parameters = [nn.Parameter(torch.ones(2))]
            with pytest.raises((RuntimeError, ValueError)) as raised:
                initialize_parallel_optimizer(config, AdamW, parameters, lr=-1.0 if rank else 0.1)
            found.append(str(raised.value))
        return found

    other, own = run_ranks(run, 2)

    assert own == ["Invalid learning rate: -1.0"] * 2
    assert other == ["making the optimizer failed on rank 1: ValueError: Invalid learning rate: -1.0"] * 2


def test_parameters_that_are_trained_later_are_averaged_and_clipped_with_the_others(run_ranks):
    def run():
        config = neuronx_distributed_config()
        rank = torch.distributed.get_rank()
        first, later = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
        optimizer = initialize_parallel_optimizer(config, SGD, [first, later], lr=1.0)
        (first + later).sum().mul(rank + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        later.requires_grad_(True)
        norms = []
        for _ in range(2):
            (first + later).sum().mul(rank + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm.item())
        return norms, later.tolist()

    by_rank = run_ranks(run, 2)

    assert by_rank[0] == by_rank[1]
    assert by_rank[0][0] == pytest.approx([3.0, 3.0])  # four gradients of 1.5
    assert by_rank[0][1] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_copy_that_would_reduce_nothing_is_refused(model):
    with pytest.raises(TypeError, match=r"bound to its parameters and ranks; copy its state_dict\(\)"):
        copy.deepcopy(make(model, lr=0.1))


def test_master_weights_follow_mixed_precision_config(model):
    for chosen, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        config = neuronx_distributed_config(
            optimizer_config={"zero_one_enabled": True}, mixed_precision_config={"use_master_weights": chosen}
        )
        half = nn.Linear(3, 2).bfloat16()
        optimizer = initialize_parallel_optimizer(config, AdamW, half.parameters(), lr=0.1)
        half(torch.ones(4, 3, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        averages = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
        assert {average.dtype for average in averages} == {dtype}


def test_init_zero_after_building_takes_the_master_weights_from_loaded_ones(model):
    model.bfloat16()
    optimizer = make(model, SGD, {"zero_one_enabled": True, "grad_clipping": False}, lr=0.0)
    with torch.no_grad():
        model.weight.fill_(2.0)  # as loading pretrained weights does

    optimizer.optimizer.init_zero()
    backward_in(model, torch.bfloat16)
    optimizer.step()

    assert model.weight.eq(2.0).all()


def backward_in(model: nn.Module, dtype: torch.dtype) -> None:
    model(torch.ones(4, 3, dtype=dtype)).square().sum().backward()


def test_class_has_what_protocols_of_optimizers_look_for(model):
    """From Python 3.12 on `isinstance` with a protocol, as Lightning asks, looks at the class and calls nothing."""
    optimizer = make(model, lr=0.1)

    for name in ("param_groups", "defaults", "state", "state_dict", "load_state_dict", "step"):
        assert inspect.getattr_static(optimizer, name) is not None
    assert optimizer.defaults["lr"] == 0.1
    assert optimizer.state is optimizer.optimizer.state
