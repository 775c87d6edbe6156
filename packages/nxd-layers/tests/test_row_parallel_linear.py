"""`RowParallelLinear` against `nn.Linear`'s arithmetic in one process, in float64."""

import pytest
import torch
from nxd_layers import (
    RowParallelLinear,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_state import get_shard_spec
from torch.nn import functional as F

INPUT, OUTPUT = 12, 5  # 12 splits over 2, 3 and 4 ranks
SHAPES = {1: (INPUT,), 2: (7, INPUT), 3: (3, 2, INPUT), 4: (2, 3, 2, INPUT)}


@pytest.fixture
def check_against_linear(logical, summed_grad, assert_same):
    """Compares output and every gradient of a layer with those of `F.linear` on the logical weights."""

    def check(layer, shape, *, sequence_dim=None):
        torch.manual_seed(1)
        whole_input = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        output_grad = torch.randn(*shape[:-1], OUTPUT, dtype=torch.float64)
        weight = logical(layer.weight).requires_grad_()
        bias = None if layer.bias is None else logical(layer.bias).clone().requires_grad_()
        expected = F.linear(whole_input, weight, bias)
        expected.backward(output_grad)

        own_input, input_grad = whole_input.detach().clone(), whole_input.grad
        if layer.input_is_parallel:
            own_input = scatter_to_tensor_model_parallel_region(own_input)
            input_grad = scatter_to_tensor_model_parallel_region(input_grad)
        if sequence_dim is not None:
            expected = scatter_to_sequence_parallel_region(expected, sequence_dim)
            output_grad = scatter_to_sequence_parallel_region(output_grad, sequence_dim)
        own_input.requires_grad_()
        output = layer(own_input)
        output.backward(output_grad)

        assert_same(output, expected)
        assert_same(own_input.grad, input_grad)
        assert_same(logical(layer.weight, layer.weight.grad), weight.grad)
        if bias is not None:
            assert_same(summed_grad(layer.bias), bias.grad)

    return check


@pytest.mark.pairs
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("input_is_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_row_linear_of_any_input_rank_equals_linear(on_tp, check_against_linear, tp, bias, input_is_parallel, dims):
    def job():
        layer = RowParallelLinear(INPUT, OUTPUT, bias, input_is_parallel, dtype=torch.float64)
        assert layer.weight.shape == (OUTPUT, INPUT // tp)
        assert bias is False or layer.bias.shape == (OUTPUT,)
        check_against_linear(layer, SHAPES[dims])

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("sequence_dim", [0, 1, -2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_row_linear_sequence_parallel_equals_linear(on_tp, check_against_linear, tp, bias, sequence_dim):
    def job():
        layer = RowParallelLinear(INPUT, OUTPUT, bias, True, True, torch.float64, sequence_dimension=sequence_dim)
        check_against_linear(layer, (12, 12, INPUT), sequence_dim=sequence_dim)

    on_tp(tp, job)


def test_row_linear_non_contiguous_input_and_gradient_equal_linear(on_tp, logical, assert_same):
    def job():
        layer = RowParallelLinear(4, 6, dtype=torch.float64)
        torch.manual_seed(1)
        whole = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        grad = torch.randn(6, 3, dtype=torch.float64)
        weight = logical(layer.weight).requires_grad_()
        F.linear(whole.t(), weight).backward(grad.t())

        own = whole.detach().clone().requires_grad_()
        layer(own.t()).backward(grad.t())

        assert_same(own.grad, whole.grad)
        assert_same(logical(layer.weight, layer.weight.grad), weight.grad)
        assert_same(layer.bias.grad, grad.sum(dim=1))

    on_tp(2, job)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_linear_keeps_the_dtype_of_its_weight(on_tp, dtype):
    def job():
        layer = RowParallelLinear(4, 6, dtype=dtype)
        output = layer(torch.ones(3, 4, dtype=dtype, requires_grad=True))
        output.sum().backward()
        assert {layer.weight.dtype, layer.bias.dtype, output.dtype, layer.weight.grad.dtype} == {dtype}

    on_tp(2, job)


def test_row_linear_parameters_carry_the_documented_attributes(on_tp):
    def job():
        layer = RowParallelLinear(4, 8, input_is_parallel=True, sequence_parallel_enabled=True)
        weight, bias = layer.weight, layer.bias
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.num_partitions) == (True, 1, 2)
        assert get_shard_spec(bias) is None
        assert not hasattr(bias, "tensor_model_parallel")
        assert bias.sequence_parallel_enabled is True
        assert RowParallelLinear(4, 8).bias.sequence_parallel_enabled is False

    on_tp(2, job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": 9}, r"2 shards do not divide dim 1 of shape \(6, 9\).*pad it to 10"),
        ({"input_size": 0}, "input_size=0, output_size=6: both must be positive"),
        ({"input_size": 8, "sequence_parallel_enabled": torch.bfloat16}, "pass dtype, device .* by keyword"),
        ({"input_size": 8, "sequence_parallel_enabled": True}, "needs input_is_parallel=True"),
    ],
)
def test_row_linear_with_wrong_arguments_raises(on_tp, arguments, message):
    def job():
        with pytest.raises(ValueError, match=message):
            RowParallelLinear(output_size=6, **arguments)

    on_tp(2, job)


@pytest.mark.parametrize(
    ("sequence_parallel", "shape", "message"),
    [
        (False, (3, 7), r"tensor_model_parallel_size=2 does not divide dim 1 of shape \(3, 7\); pad it to 8"),
        (True, (3, 4), r"2 ranks does not divide dim 0 of shape \(3, 6\); pad it to 4"),
    ],
)
def test_row_linear_of_an_input_that_does_not_divide_raises(on_tp, sequence_parallel, shape, message):
    def job():
        layer = RowParallelLinear(
            8, 6, input_is_parallel=sequence_parallel, sequence_parallel_enabled=sequence_parallel
        )
        with pytest.raises(ValueError, match=message):
            layer(torch.ones(shape))

    on_tp(2, job)


def test_row_linear_built_before_the_mesh_raises_when_used(on_tp):
    from nxd_state import destroy_model_parallel, initialize_model_parallel

    def job():
        destroy_model_parallel()
        layer = RowParallelLinear(4, 8)
        initialize_model_parallel(tensor_model_parallel_size=2)
        with pytest.raises(RuntimeError, match="built for tensor_model_parallel_size=1, but it is 2 now"):
            layer(torch.ones(3, 4))

    on_tp(2, job)
