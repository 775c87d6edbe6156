"""Layers with `pad=True`, whose sizes do not divide, against `F.linear` on their logical weights, in float64."""

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from nxd_state import active_group
from torch.nn import functional as F

SHAPE = (4, 3)  # of the tokens
OTHER = 6
SIZES = [7, 5, 9, 1]  # with 4 ranks, 5 and 1 leave some of them nothing but padding


def logical_leaves(logical, layer, size):
    """Whole weight and bias, and an input, to compute with in one process."""
    torch.manual_seed(1)
    parameters = [logical(parameter).clone().requires_grad_() for parameter in (layer.weight, layer.bias)]
    return [*parameters, torch.randn(*SHAPE, size, dtype=torch.float64, requires_grad=True)]


def without_padding(output, layer):
    """The whole output of a layer that does not gather, with its padding, which must be zero, taken off."""
    whole = gather_from_tensor_model_parallel_region(output)
    chunks = whole.unflatten(-1, (layer.tensor_parallel_size, layer.stride, -1)).transpose(-3, -2).flatten(-2)
    length = layer.output_size // layer.stride
    assert torch.count_nonzero(chunks[..., length:]) == 0
    return chunks[..., :length].flatten(-2)


@pytest.mark.pairs
@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padded_column_linear_equals_linear(on_tp, logical, assert_same, tp, stride, gather_output):
    def job():
        for size in SIZES:
            layer = ColumnParallelLinear(
                OTHER, size * stride, gather_output=gather_output, dtype=torch.float64, stride=stride, pad=True
            )
            assert layer.weight.shape == (-(-size // tp) * stride, OTHER)
            leaves = logical_leaves(logical, layer, OTHER)
            expected = F.linear(leaves[2], leaves[0], leaves[1])
            output_grad = torch.randn_like(expected)
            input_ = leaves[2].detach().requires_grad_()

            output = layer(input_)
            whole = output if gather_output else without_padding(output, layer)
            whole.backward(output_grad)

            assert_same(whole, expected)
            expected.backward(output_grad)
            for actual, leaf in zip((layer.weight, layer.bias), leaves, strict=False):
                assert_same(logical(actual, actual.grad), leaf.grad)
            assert_same(input_.grad, leaves[2].grad)

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("input_is_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padded_row_linear_equals_linear(
    on_tp, logical, assert_same, summed_grad, tp, input_is_parallel, sequence_parallel
):
    def job():
        if sequence_parallel and not input_is_parallel:
            return
        for size in SIZES:
            layer = RowParallelLinear(
                size,
                OTHER,
                input_is_parallel=input_is_parallel,
                sequence_parallel_enabled=sequence_parallel,
                dtype=torch.float64,
                pad=True,
            )
            assert layer.weight.shape == (OTHER, -(-size // tp))
            leaves = logical_leaves(logical, layer, size)
            expected = F.linear(leaves[2], leaves[0], leaves[1])
            output_grad = torch.randn_like(expected)
            input_ = leaves[2].detach().requires_grad_()
            given = input_
            if input_is_parallel:  # anything may stand at the padding
                own = F.pad(input_, (0, -size % tp), value=3.0).chunk(tp, dim=-1)
                given = own[active_group("tp").rank]

            output = layer(given)
            own_grad = scatter_to_sequence_parallel_region(output_grad) if sequence_parallel else output_grad
            own_expected = scatter_to_sequence_parallel_region(expected) if sequence_parallel else expected
            assert_same(output, own_expected)
            output.backward(own_grad)

            expected.backward(output_grad)
            assert_same(logical(layer.weight, layer.weight.grad), leaves[0].grad)
            assert_same(summed_grad(layer.bias), leaves[1].grad)

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [2, 4])
def test_padded_linears_keep_their_padding_zero_whatever_reads_it(on_tp, tp):
    def job():
        column = ColumnParallelLinear(OTHER, 5, gather_output=False, pad=True)
        row = RowParallelLinear(5, OTHER, input_is_parallel=True, pad=True)
        optimizer = torch.optim.AdamW([*column.parameters(), *row.parameters()], lr=0.1, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            row(torch.cos(column(torch.randn(*SHAPE, OTHER)) + 1)).square().sum().backward()
            optimizer.step()
        rows = [tensor.detach() for tensor in (column.weight, column.bias, row.weight.t())]
        return [gather_from_tensor_model_parallel_region(tensor, 0)[5:] for tensor in rows]

    for padding in on_tp(tp, job)[0]:
        assert len(padding) == -5 % tp
        assert torch.count_nonzero(padding) == 0


@pytest.mark.parametrize("layer_type", [ColumnParallelLinear, RowParallelLinear])
def test_linear_whose_size_does_not_divide_raises_without_pad(on_tp, layer_type):
    def job():
        with pytest.raises(ValueError, match=r"2 shards do not divide dim . of shape .* pad it to 8"):
            layer_type(7, 7)

    on_tp(2, job)
