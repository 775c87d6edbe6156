"""`ColumnParallelLinear` against `nn.Linear`'s arithmetic in one process, in float64."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, scatter_to_sequence_parallel_region
from nxd_state import get_shard_spec, get_tensor_model_parallel_rank
from nxd_state.parameter_marks import MatrixLayout, get_matrix_layout
from torch.nn import functional as F

INPUT, OUTPUT = 5, 72  # 72 splits into up to 4 ranks x 3 fused matrices
SHAPES = {1: (INPUT,), 2: (7, INPUT), 3: (3, 2, INPUT), 4: (2, 3, 2, INPUT)}


@pytest.fixture
def check_against_linear(logical, own_rows, assert_same):
    """Compares output and every gradient of a layer with those of `F.linear` on the logical weights."""

    def check(layer, shape, *, sequence_dim=None):
        torch.manual_seed(1)
        whole_input = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        output_grad = torch.randn(*shape[:-1], OUTPUT, dtype=torch.float64)
        weight = logical(layer.weight).requires_grad_()
        bias = None if layer.bias is None else logical(layer.bias).requires_grad_()
        expected = F.linear(whole_input, weight, bias)
        expected.backward(output_grad)

        own_input = whole_input.detach().clone()
        if sequence_dim is not None:
            own_input = scatter_to_sequence_parallel_region(own_input, sequence_dim)
        own_input.requires_grad_()
        output = layer(own_input)
        if not layer.gather_output:
            expected, output_grad = (own_rows(layer.weight, whole, -1) for whole in (expected, output_grad))
        output.backward(output_grad)

        input_grad = whole_input.grad
        if sequence_dim is not None:
            input_grad = scatter_to_sequence_parallel_region(input_grad, sequence_dim)
        assert_same(output, expected)
        assert_same(own_input.grad, input_grad)
        assert_same(logical(layer.weight, layer.weight.grad), weight.grad)
        if bias is not None:
            assert_same(logical(layer.bias, layer.bias.grad), bias.grad)

    return check


@pytest.mark.pairs
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_column_linear_of_any_input_rank_equals_linear(on_tp, check_against_linear, tp, bias, gather_output, dims):
    def job():
        layer = ColumnParallelLinear(INPUT, OUTPUT, bias, gather_output, dtype=torch.float64)
        assert layer.weight.shape == (OUTPUT // tp, INPUT)
        assert bias is False or layer.bias.shape == (OUTPUT // tp,)
        check_against_linear(layer, SHAPES[dims])

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("sequence_dim", [0, 1, -2])
@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_column_linear_sequence_parallel_equals_linear(
    on_tp, check_against_linear, tp, bias, gather_output, sequence_dim
):
    def job():
        layer = ColumnParallelLinear(
            INPUT, OUTPUT, bias, gather_output, True, torch.float64, sequence_dimension=sequence_dim
        )
        check_against_linear(layer, (12, 12, INPUT), sequence_dim=sequence_dim)

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_column_linear_of_fused_matrices_equals_linear(
    on_tp, check_against_linear, tp, stride, gather_output, sequence_dim
):
    def job():
        layer = ColumnParallelLinear(
            INPUT,
            OUTPUT,
            gather_output=gather_output,
            sequence_parallel_enabled=sequence_dim is not None,
            dtype=torch.float64,
            stride=stride,
            sequence_dimension=sequence_dim or 0,
        )
        check_against_linear(layer, (12, 12, INPUT), sequence_dim=sequence_dim)

    on_tp(tp, job)


def test_column_linear_of_two_fused_matrices_holds_a_chunk_of_each(on_tp, own_rows):
    def job():
        layer = ColumnParallelLinear(1, 8, dtype=torch.float64, stride=2)
        return own_rows(layer.weight, torch.arange(8), 0).tolist()

    assert on_tp(2, job) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_column_linear_non_contiguous_input_and_gradient_equal_linear(on_tp, logical, own_rows, assert_same):
    def job():
        layer = ColumnParallelLinear(4, 6, gather_output=False, dtype=torch.float64)
        torch.manual_seed(1)
        whole = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        grad = torch.randn(6, 3, dtype=torch.float64)
        weight, bias = logical(layer.weight).requires_grad_(), logical(layer.bias).requires_grad_()
        F.linear(whole.t(), weight, bias).backward(grad.t())

        own = whole.detach().clone().requires_grad_()
        layer(own.t()).backward(own_rows(layer.weight, grad, 0).t())

        assert_same(own.grad, whole.grad)
        assert_same(logical(layer.weight, layer.weight.grad), weight.grad)
        assert_same(logical(layer.bias, layer.bias.grad), bias.grad)

    on_tp(2, job)


def test_column_linear_gradient_expanded_from_a_sum_equals_linear(on_tp, logical, assert_same):
    def job():
        layer = ColumnParallelLinear(4, 6, gather_output=False, dtype=torch.float64)
        own = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        layer(own).sum().backward()  # the gradient of a sum has stride 0
        assert_same(own.grad, logical(layer.weight).sum(dim=0).expand(3, 4))

    on_tp(2, job)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_column_linear_keeps_the_dtype_of_its_weight(on_tp, dtype):
    def job():
        layer = ColumnParallelLinear(4, 6, dtype=dtype)
        output = layer(torch.ones(3, 4, dtype=dtype, requires_grad=True))
        output.sum().backward()
        assert {layer.weight.dtype, layer.bias.dtype, output.dtype, layer.weight.grad.dtype} == {dtype}

    on_tp(2, job)


def test_column_linear_parameters_carry_the_documented_attributes(on_tp):
    def job():
        layer = ColumnParallelLinear(4, 8, stride=2)
        return [
            (p.tensor_model_parallel, p.partition_dim, p.partition_stride, p.num_partitions, get_shard_spec(p).axis)
            for p in (layer.weight, layer.bias)
        ]

    assert on_tp(2, job) == [[(True, 0, 2, 2, "tp")] * 2] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_column_linear_of_fused_matrices_is_marked_with_them(on_tp, tp):
    def job():
        layers = ColumnParallelLinear(4, 8, stride=2), ColumnParallelLinear(4, 8)
        return [get_matrix_layout(layer.weight) for layer in layers]

    assert on_tp(tp, job) == [[MatrixLayout(sections=(4, 4)), None]] * tp


def test_column_linear_bias_shards_differ_between_ranks(on_tp):
    def job():
        return ColumnParallelLinear(4, 8).bias

    first, second = on_tp(2, job)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_size": 9}, r"2 shards do not divide dim 0 of shape \(9, 4\).*pad it to 10"),
        ({"output_size": 6, "stride": 2}, r"2 shards of 2 fused matrices do not divide dim 0 of shape \(6, 4\)"),
        ({"output_size": 0}, "output_size=0: both must be positive"),
        ({"output_size": 8, "sequence_parallel_enabled": torch.bfloat16}, "pass dtype, device .* by keyword"),
    ],
)
def test_column_linear_with_wrong_arguments_raises(on_tp, arguments, message):
    def job():
        with pytest.raises(ValueError, match=message):
            ColumnParallelLinear(4, **arguments)

    on_tp(2, job)


def test_column_linear_built_before_the_mesh_raises_when_used(on_tp):
    from nxd_state import destroy_model_parallel, initialize_model_parallel

    def job():
        destroy_model_parallel()
        layer = ColumnParallelLinear(4, 8)
        initialize_model_parallel(tensor_model_parallel_size=2)
        with pytest.raises(RuntimeError, match="built for tensor_model_parallel_size=1, but it is 2 now"):
            layer(torch.ones(3, 4))

    on_tp(2, job)


def test_column_linear_shows_its_local_and_whole_sizes(on_tp):
    def job():
        return repr(ColumnParallelLinear(4, 8)), get_tensor_model_parallel_rank()

    assert on_tp(2, job)[1] == (
        "ColumnParallelLinear(in=4, out=8, local=(4, 4), bias=True, gather_output=True, sequence_parallel=False)",
        1,
    )
