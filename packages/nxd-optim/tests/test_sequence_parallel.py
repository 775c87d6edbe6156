"""Gradients of sequence-parallel parameters, summed over the tensor-parallel ranks."""

import pytest
import torch
from nxd_optim import GradientReducer, reduce_sequence_parallel_gradients
from nxd_state import get_group, initialize_model_parallel
from torch import nn


def marked(values, dtype=torch.float32):
    """A parameter in a sequence-parallel region, with a gradient."""
    parameter = nn.Parameter(torch.zeros(torch.tensor(values).shape, dtype=dtype))
    parameter.sequence_parallel_enabled = True
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_marked_gradients_are_summed_over_tensor_parallel_ranks_and_others_left_alone(run_ranks, ranks):
    def reduce():
        initialize_model_parallel(tensor_model_parallel_size=ranks)
        power = 2.0 ** get_group("tp").rank
        norm, bias = marked([[power, 10 * power], [0.0, 1.0]]), marked(power)
        unmarked, disabled = marked([power]), marked([power])
        del unmarked.sequence_parallel_enabled
        disabled.sequence_parallel_enabled = False
        gradients = [p.grad for p in (norm, bias, unmarked, disabled)]
        reduce_sequence_parallel_gradients(p for p in (norm, unmarked, bias, disabled, norm))
        assert all(p.grad is g for p, g in zip((norm, bias, unmarked, disabled), gradients, strict=True))
        return [g.tolist() for g in gradients]

    results = run_ranks(reduce, ranks)

    total = 2**ranks - 1
    for rank, gradients in enumerate(results):
        assert gradients == [[[total, 10 * total], [0, ranks]], total, [2**rank], [2**rank]]


def test_one_message_per_dtype_carries_all_gradients(run_ranks, recorded_messages):
    def reduce():
        initialize_model_parallel(tensor_model_parallel_size=2)
        dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
        parameters = [marked([1.0 + i] * (1 + i), dtype) for i, dtype in enumerate(dtypes)]
        with recorded_messages() as messages:
            reduce_sequence_parallel_gradients(parameters + parameters)
        return [message[1:] for message in messages], [(p.grad.dtype, p.grad.tolist()) for p in parameters]

    for messages, gradients in run_ranks(reduce, 2):
        assert messages == [(1 + 3, torch.float32), (2 + 4, torch.bfloat16)]
        assert gradients == [
            (torch.float32, [2.0]),
            (torch.bfloat16, [4.0] * 2),
            (torch.float32, [6.0] * 3),
            (torch.bfloat16, [8.0] * 4),
        ]


def test_no_message_without_marked_parameters(run_ranks, recorded_messages):
    def reduce():
        initialize_model_parallel(tensor_model_parallel_size=2)
        frozen = marked([1.0])
        frozen.requires_grad_(False)
        with recorded_messages() as messages:
            reduce_sequence_parallel_gradients([frozen, nn.Parameter(torch.ones(2))])
        return messages, frozen.grad.tolist()

    assert run_ranks(reduce, 2) == [([], [1.0])] * 2


def test_gradient_missing_on_one_rank_counts_as_zero(run_ranks):
    def reduce():
        initialize_model_parallel(tensor_model_parallel_size=2)
        here, nowhere = marked([4.0, 5.0]), marked([1.0])
        nowhere.grad = None
        if get_group("tp").rank == 1:
            here.grad = None
        reduce_sequence_parallel_gradients([here, nowhere])
        return here.grad.tolist(), nowhere.grad.tolist()

    assert run_ranks(reduce, 2) == [([4, 5], [0])] * 2


def test_non_contiguous_gradients_are_summed_in_place(run_ranks):
    def reduce():
        initialize_model_parallel(tensor_model_parallel_size=2)
        parameter = marked([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        parameter.grad = torch.arange(6.0).view(3, 2).t()
        reduce_sequence_parallel_gradients([parameter])
        return parameter.grad.tolist()

    assert run_ranks(reduce, 2) == [[[0, 4, 8], [2, 6, 10]]] * 2


def test_sum_over_tensor_parallel_ranks_follows_the_average_over_replicas(run_ranks):
    def step():
        initialize_model_parallel(tensor_model_parallel_size=2)
        parameter = marked([0.0, 0.0])
        reducer = GradientReducer([parameter])
        with reducer.overlap_backward():
            (parameter * 10.0 ** torch.distributed.get_rank()).sum().backward()
        reducer.finish()
        reduce_sequence_parallel_gradients([parameter])
        return parameter.grad.tolist()

    assert run_ranks(step, 4) == [[1111 / 2] * 2] * 4


def test_sum_is_over_the_group_that_is_given(run_ranks):
    def reduce():
        initialize_model_parallel()
        parameter = marked([1.0])
        reduce_sequence_parallel_gradients([parameter], get_group("dp"))
        return parameter.grad.item()

    assert run_ranks(reduce, 2) == [2, 2]


def test_without_a_mesh_gradients_stay():
    parameter = marked([1.0])

    reduce_sequence_parallel_gradients([parameter])

    assert parameter.grad.tolist() == [1]
