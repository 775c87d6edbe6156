"""Adapters on layers that share their input: the numbers of separate calls, with one collective per direction more."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, column_parallel_linears
from nxd_lora import LoraConfig, LoraModel
from nxd_state import get_tensor_model_parallel_rank
from torch import nn


def make_model(sequence_dim, targets=("0", "2"), **settings):
    torch.manual_seed(3)
    layers = [
        ColumnParallelLinear(
            6,
            size,
            gather_output=False,
            sequence_parallel_enabled=sequence_dim is not None,
            dtype=torch.float64,
            sequence_dimension=sequence_dim or 0,
        )
        for size in (8, 4, 12)
    ]
    return LoraModel(nn.ModuleList(layers), LoraConfig(lora_rank=2, target_modules=list(targets), **settings))


def make_input(sequence_dim):
    torch.manual_seed(7 if sequence_dim is None else 7 + get_tensor_model_parallel_rank())
    return torch.randn(4, 4, 6, dtype=torch.float64, requires_grad=True)


def backward_of(outputs):
    torch.manual_seed(11 + get_tensor_model_parallel_rank())
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


@pytest.mark.pairs
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_of_a_shared_input_with_adapters_give_the_numbers_of_separate_calls(
    on_tp, fill_adapter, assert_same, tp, sequence_dim, dropout
):
    def job():
        together, apart = (make_model(sequence_dim, lora_dropout=dropout) for _ in range(2))
        fill_adapter(together), fill_adapter(apart)
        inputs = [make_input(sequence_dim) for _ in range(2)]
        torch.manual_seed(0)
        outputs = column_parallel_linears(inputs[0], list(together.module))
        torch.manual_seed(0)
        expected = [layer(inputs[1]) for layer in apart.module]
        backward_of(outputs)
        backward_of(expected)

        for output, one in zip(outputs, expected, strict=True):
            assert_same(output, one)
        assert_same(inputs[0].grad, inputs[1].grad)
        others = apart.adapter_parameters()
        for name, parameter in together.adapter_parameters().items():
            assert_same(parameter.grad, others[name].grad)

    on_tp(tp, job)


@pytest.mark.parametrize(
    ("sequence_dim", "forward", "backward"),
    [(None, [], ["c10d::allreduce_"] * 2), (0, ["c10d::_allgather_base_"] * 2, ["c10d::alltoall_base_"] * 2)],
)
def test_adapters_of_a_shared_input_communicate_once_per_direction(on_tp, collectives, sequence_dim, forward, backward):
    def job():
        model, input_, outputs = make_model(sequence_dim, "012"), make_input(sequence_dim), []
        in_forward = collectives(lambda: outputs.extend(column_parallel_linears(input_, list(model.module))))
        return in_forward, collectives(lambda: backward_of(outputs))

    assert on_tp(2, job) == [(forward, backward)] * 2


def test_merged_adapters_of_a_shared_input_are_not_added_again(on_tp, fill_adapter, assert_same):
    def job():
        model, input_ = make_model(None), make_input(None)
        fill_adapter(model)
        before = column_parallel_linears(input_, list(model.module))
        model.merge()
        for output, expected in zip(column_parallel_linears(input_, list(model.module)), before, strict=True):
            assert_same(output, expected, rtol=1e-12)

    on_tp(2, job)
