"""The order of calls that a step needs, what other orders raise, and how a step that failed is dropped."""

import pytest
import torch
from nxd_optim import GradientReducer
from nxd_state import get_group, initialize_model_parallel
from torch import nn
from torch.utils.checkpoint import checkpoint


def fail(gradient):
    raise FloatingPointError("backward failed")


def make_reducer():
    """Three parameters in three buckets, which backward of `loss` fills from the last to the first."""
    initialize_model_parallel()
    return GradientReducer([nn.Parameter(torch.full((2,), 1.0)) for _ in range(3)], bucket_bytes=1)


def loss(reducer, factor=1.0, fail_before=None):
    """The sum of all parameters; backward fails before it reaches the parameter of index `fail_before`."""
    x = torch.zeros(2)
    for index, parameter in enumerate(reducer.parameters):
        x = x + parameter
        if index == fail_before:
            x.register_hook(fail)
    return (x * factor).sum()


def backward_overlapped(reducer, *losses, then=lambda: None):
    with reducer.overlap_backward():
        for each in losses:
            each.backward()
        then()


def fail_after_backward():
    raise ZeroDivisionError


def gradients(reducer):
    return [p.grad.tolist() for p in reducer.parameters]


def test_second_backward_inside_overlap_raises(run_ranks):
    def step():
        reducer = make_reducer()
        with pytest.raises(RuntimeError, match=r"shape \(2,\) got a second gradient .* enter overlap_backward"):
            backward_overlapped(reducer, loss(reducer), loss(reducer))

    run_ranks(step, 2)


def test_second_gradient_inside_overlap_raises_although_its_bucket_has_not_left(run_ranks):
    def step():
        reducer = make_reducer()
        first = reducer.parameters[0]
        with pytest.raises(RuntimeError, match="second gradient"):
            backward_overlapped(reducer, first.sum(), first.sum())

    run_ranks(step, 2)


def test_backward_between_overlap_and_finish_raises(run_ranks):
    def step():
        reducer = make_reducer()
        backward_overlapped(reducer, loss(reducer))
        with pytest.raises(RuntimeError, match="second gradient"):
            loss(reducer).backward()
        with pytest.raises(RuntimeError, match=r"finish\(\) cannot be called now: this step failed"):
            reducer.finish()

    run_ranks(step, 2)


def test_reentrant_checkpoints_around_a_tied_weight_raise_and_say_so(run_ranks):
    def step():
        reducer = make_reducer()
        parameter = reducer.parameters[0]

        def layer(x):
            return x * parameter

        x = torch.ones(2, requires_grad=True)
        x = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            backward_overlapped(reducer, x.sum())

    run_ranks(step, 2)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_reentrant_checkpoints_around_a_tied_weight_are_averaged_without_overlap(run_ranks, accumulation):
    def step():
        reducer = make_reducer()
        parameter = reducer.parameters[0]

        def layer(x):
            return x * parameter

        for _ in range(accumulation):
            x = torch.full((2,), float(get_group("dp").rank), requires_grad=True)
            x = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
            x.sum().backward()
        reducer.finish()
        return parameter.grad.tolist()

    assert run_ranks(step, 2) == [[accumulation, accumulation]] * 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_overlap_twice_without_finish_raises(run_ranks, replicas):
    def step():
        reducer = make_reducer()
        backward_overlapped(reducer)
        with pytest.raises(RuntimeError, match=r"overlap_backward\(\) cannot be called now: .* call finish\(\) first"):
            backward_overlapped(reducer)

    run_ranks(step, replicas)


@pytest.mark.parametrize("call", ["finish", "zero_grad"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_finish_and_zero_grad_inside_overlap_raise(run_ranks, replicas, call):
    def step():
        reducer = make_reducer()
        with pytest.raises(RuntimeError, match=rf"{call}\(\) cannot be called now: leave the block"):
            backward_overlapped(reducer, loss(reducer), then=getattr(reducer, call))

    run_ranks(step, replicas)


def test_finish_twice_changes_nothing(run_ranks):
    def step():
        reducer = make_reducer()
        loss(reducer, factor=get_group("dp").rank).backward()
        reducer.finish()
        reducer.finish()
        return gradients(reducer)

    assert run_ranks(step, 2) == [[[0.5, 0.5]] * 3] * 2


def test_zero_grad_before_finish_drops_the_step(run_ranks):
    def step():
        reducer = make_reducer()
        backward_overlapped(reducer, loss(reducer, factor=100))
        reducer.zero_grad()
        zeros = gradients(reducer)
        backward_overlapped(reducer, loss(reducer, factor=get_group("dp").rank))
        reducer.finish()
        return zeros, gradients(reducer)

    assert run_ranks(step, 2) == [([[0.0, 0.0]] * 3, [[0.5, 0.5]] * 3)] * 2


@pytest.mark.parametrize("fail_before", [(0, 0), (0, 2), (2, 0), (1, None)])
def test_step_that_failed_at_different_points_is_dropped_by_zero_grad(run_ranks, recorded_messages, fail_before):
    def step():
        reducer = make_reducer()
        rank = get_group("dp").rank
        failing = loss(reducer, factor=100, fail_before=fail_before[rank])
        with recorded_messages() as messages, pytest.raises(ArithmeticError):
            backward_overlapped(reducer, failing, then=fail_after_backward)
        sent = len(messages)
        with pytest.raises(RuntimeError, match=r"finish\(\) cannot be called now: .*zero_grad\(\) of the reducer"):
            reducer.finish()
        with pytest.raises(RuntimeError, match="this step failed"):
            backward_overlapped(reducer)

        reducer.zero_grad()

        zeros = gradients(reducer)
        backward_overlapped(reducer, loss(reducer, factor=rank))
        reducer.finish()
        return sent, zeros, gradients(reducer)

    results = run_ranks(step, 2)

    sent_before_failure = [3 if index is None else 2 - index for index in fail_before]
    assert [sent for sent, _, _ in results] == sent_before_failure
    for _, zeros, averages in results:
        assert zeros == [[0.0, 0.0]] * 3
        assert averages == [[0.5, 0.5]] * 3


def test_step_that_failed_in_an_earlier_backward_is_dropped_by_zero_grad(run_ranks, recorded_messages):
    def step():
        reducer = make_reducer()
        rank = get_group("dp").rank
        with recorded_messages() as messages:
            with pytest.raises(FloatingPointError):
                loss(reducer, factor=100, fail_before=1).backward()
            reducer.zero_grad()
        loss(reducer, factor=rank).backward()
        reducer.finish()
        return len(messages), gradients(reducer)

    assert run_ranks(step, 2) == [(0, [[0.5, 0.5]] * 3)] * 2


def test_close_leaves_gradients_to_autograd(run_ranks):
    def step():
        initialize_model_parallel()
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        reducer = GradientReducer(parameters)
        storages = []
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
                parameter.sum().backward()
            storages.append(len({p.grad.untyped_storage().data_ptr() for p in parameters}))
            reducer.close()
        return storages

    assert run_ranks(step, 2) == [[1, 2]] * 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_reducer_may_follow_one_that_was_closed(run_ranks, recorded_messages, replicas):
    def step():
        reducer = make_reducer()
        reducer.close()
        successor = GradientReducer(reducer.parameters, bucket_bytes=1)
        with recorded_messages() as messages:
            backward_overlapped(successor, loss(successor, factor=get_group("dp").rank))
            successor.finish()
        return len(messages), gradients(successor)

    average = (replicas - 1) / 2
    assert run_ranks(step, replicas) == [(3 if replicas > 1 else 0, [[average] * 2] * 3)] * replicas
