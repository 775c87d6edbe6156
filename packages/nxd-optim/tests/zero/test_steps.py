"""The order of calls of a step, steps that fail or are skipped, and parameters that arrive during the next forward."""

import pytest
import torch
from nxd_optim.zero import NeuronZero1Optimizer, ZeroRedundancyOptimizer, flat_bucket, flat_parameters
from nxd_state import active_group, initialize_model_parallel
from nxd_testing import RankFailure
from torch import nn


def fail(gradient):
    raise FloatingPointError("backward failed")


def make_optimizer(**arguments):
    """Three parameters in three buckets, which backward of `loss` fills from the last to the first."""
    initialize_model_parallel()
    parameters = [nn.Parameter(torch.ones(2, 1, dtype=torch.float64)) for _ in range(3)]
    arguments = {"lr": 1.0, "grad_clipping": False, "bucket_cap_mb_reduce_scatter": 1e-6} | arguments
    return NeuronZero1Optimizer(parameters, torch.optim.SGD, **arguments), parameters


def loss(parameters, factor=1.0, fail_before=None):
    x = torch.zeros(2, 1, dtype=torch.float64)
    for index, parameter in enumerate(parameters):
        x = x + parameter
        if index == fail_before:
            x.register_hook(fail)
    return (x * factor).sum()


def weights(parameters):
    return [p.flatten().tolist() for p in parameters]


@pytest.mark.parametrize("fail_before", [(0, 0), (0, 2), (2, 0)])
def test_step_that_failed_at_different_points_is_dropped_by_zero_grad(run_ranks, fail_before):
    def train():
        optimizer, parameters = make_optimizer()
        rank = active_group("dp").rank
        with pytest.raises(FloatingPointError), optimizer.overlap_backward():
            loss(parameters, factor=100, fail_before=fail_before[rank]).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) cannot be called now: .*zero_grad\(\) of the optimizer"):
            optimizer.step()

        optimizer.zero_grad()

        with optimizer.overlap_backward():
            loss(parameters, factor=rank).backward()
        optimizer.step()
        return weights(parameters)

    assert run_ranks(train, 2) == [[[0.5, 0.5]] * 3] * 2


def test_gradients_clipped_before_a_step_are_final_and_the_step_applies_them_once(run_ranks):
    def train():
        optimizer, parameters = make_optimizer()
        loss(parameters, factor=4 * active_group("dp").rank).backward()  # a mean of 2, six times
        norm = optimizer.clip_grad_norm(24**0.5 / 4 - 1e-6 / 4)
        refusal = r"cannot be called now: this step's gradients have been clipped; call step\(\) or zero_grad\(\)"
        for call in (lambda: optimizer.clip_grad_norm(1.0), lambda: optimizer.step(lambda: None)):
            with pytest.raises(RuntimeError, match=refusal):
                call()
        with pytest.raises(RuntimeError, match=r"backward\(\) " + refusal):
            loss(parameters).backward()
        optimizer.step()
        assert norm == optimizer.grad_norm == pytest.approx(24**0.5)

        loss(parameters).backward()  # not clipped
        optimizer.step()
        assert optimizer.grad_norm is None
        return weights(parameters)

    for found in run_ranks(train, 2):
        assert found == [pytest.approx([-0.5, -0.5], rel=1e-6)] * 3


def test_clipping_in_step_and_before_it_are_not_combined(run_ranks):
    def train():
        optimizer, _ = make_optimizer(grad_clipping=True, max_norm=2.0)
        with pytest.raises(RuntimeError, match=r"clips at max_norm=2.0 already; pass grad_clipping=False"):
            optimizer.clip_grad_norm(1.0)

    run_ranks(train, 1)


def test_rank_that_dies_in_backward_ends_the_others(run_ranks):
    def train():
        optimizer, parameters = make_optimizer()
        with optimizer.overlap_backward():
            loss(parameters, fail_before=0 if active_group("dp").rank == 1 else None).backward()
        optimizer.step()

    with pytest.raises(RankFailure) as failure:
        run_ranks(train, 2)

    assert "FloatingPointError: backward failed" in failure.value.failures[1].summary


def test_gradients_leave_while_backward_goes_on_and_not_before(run_ranks):
    def train():
        optimizer, parameters = make_optimizer()
        events = []

        def noted(function):
            return lambda *args, **kwargs: events.append("message") or function(*args, **kwargs)

        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: events.append(index))
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((flat_bucket, "reduce_scatter_mean"), (flat_parameters, "all_gather_")):
                patch.setattr(module, name, noted(getattr(module, name)))
            loss(parameters).backward()
            with optimizer.overlap_backward():
                loss(parameters).backward()
            optimizer.step()
        return events

    for events in run_ranks(train, 2):
        # Accumulated; then a message after each bucket is full; then one per bucket to gather the parameters.
        assert events == [2, 1, 0, "message", 2, "message", 1, "message", 0, *["message"] * 3]


def test_second_backward_inside_overlap_raises(run_ranks):
    def train():
        optimizer, parameters = make_optimizer()

        def twice():
            with optimizer.overlap_backward():
                loss(parameters).backward()
                loss(parameters).backward()

        with pytest.raises(RuntimeError, match=r"shape \(2, 1\) got a second gradient"):
            twice()

    run_ranks(train, 2)


@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_step_and_zero_grad_inside_overlap_raise(call):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD)

    with (
        pytest.raises(RuntimeError, match=rf"{call}\(\) cannot be called now: leave the block"),
        optimizer.overlap_backward(),
    ):
        getattr(optimizer, call)()


def test_overlap_twice_and_groups_added_before_the_step_raise():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD)
    with optimizer.overlap_backward():
        parameter.sum().backward()

    with (
        pytest.raises(RuntimeError, match=r"overlap_backward\(\) cannot be called now: .* call step\(\) first"),
        optimizer.overlap_backward(),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) cannot be called now"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_gradients_are_gone_after_the_step_and_a_step_without_any_does_nothing(run_ranks):
    def train():
        optimizer, parameters = make_optimizer()
        loss(parameters).backward()
        optimizer.step()
        gradients = [p.grad for p in parameters]
        optimizer.step()
        return gradients, weights(parameters)

    assert run_ranks(train, 2) == [([None] * 3, [[0.0, 0.0]] * 3)] * 2


def test_zero_grad_to_zero_keeps_gradients_that_there_are():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = NeuronZero1Optimizer([first, second], torch.optim.SGD, grad_clipping=False, lr=1.0, weight_decay=0.5)
    first.sum().backward()

    optimizer.zero_grad(set_to_none=False)

    assert first.grad.tolist() == [0.0, 0.0]
    optimizer.step()
    assert (first.tolist(), second.tolist()) == ([0.5, 0.5], [1.0, 1.0])


def test_closure_computes_the_loss_with_gradients_enabled(run_ranks):
    def train():
        optimizer, parameters = make_optimizer()

        def closure():
            optimizer.zero_grad()
            value = loss(parameters)
            value.backward()
            return value

        with torch.no_grad():
            return float(optimizer.step(closure)), weights(parameters)

    assert run_ranks(train, 2) == [(6.0, [[0.0, 0.0]] * 3)] * 2


@pytest.mark.parametrize("clipping", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_step_with_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all_when_asked(run_ranks, value, clipping):
    def train():
        optimizer, parameters = make_optimizer(grad_clipping=clipping, max_norm=100.0)
        optimizer.skip_non_finite_steps = True
        for factor in (value if active_group("dp").rank == 2 else 1.0, 1.0):
            loss(parameters, factor=factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.skipped_steps, weights(parameters), optimizer.grad_norm is not None

    assert run_ranks(train, 4) == [(1, [[0.0, 0.0]] * 3, clipping)] * 4


def test_grad_norm_is_none_before_the_first_step_and_then_that_before_clipping(run_ranks):
    def train():
        optimizer, parameters = make_optimizer(grad_clipping=True)
        before = optimizer.grad_norm
        loss(parameters).backward()
        optimizer.step()
        return before, float(optimizer.grad_norm), float(parameters[0][0])

    clipped = pytest.approx(1 - 1 / (6**0.5 + 1e-6), rel=1e-12)  # max_norm=None means 1.0
    assert run_ranks(train, 2) == [(None, pytest.approx(6**0.5, rel=1e-12), clipped)] * 2


def test_parameters_that_arrive_during_the_next_forward_are_whole_where_they_are_read(run_ranks):
    def train(overlap):
        if active_group("dp").size == 1:
            initialize_model_parallel()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.AdamW, bucket_cap_mb_reduce_scatter=0.0001, lr=0.1
        )
        if overlap:
            optimizer.overlap_forward(model)
        x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5)[active_group("dp").rank :: 4]
        for _ in range(5):
            with optimizer.overlap_backward():
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        last = next(model.state_dict()[name].clone() for name in reversed(model.state_dict()))
        optimizer.wait_for_parameters()
        return [last, *(p.detach().clone() for p in model.parameters())]

    def train_both():
        return train(False), train(True)

    results = run_ranks(train_both, 4)

    for expected, found in results:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(found, results[0][0], rtol=0, atol=0)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_bad_max_norm_raises(max_norm):
    with pytest.raises(ValueError, match=r"max_norm=.* must be zero or more; pass grad_clipping=False"):
        NeuronZero1Optimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, max_norm=max_norm)


@pytest.mark.parametrize("argument", ["bucket_cap_mb_all_gather", "bucket_cap_mb_reduce_scatter"])
def test_bad_bucket_cap_raises(argument):
    with pytest.raises(ValueError, match=f"{argument}=-1 must be positive, or 0 for the default"):
        NeuronZero1Optimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, **{argument: -1})


def test_the_name_of_torch_xla_is_the_same_class():
    assert ZeroRedundancyOptimizer is NeuronZero1Optimizer
