"""`column_parallel_linears`: numbers and hooks of separate layers, one collective per direction, overlapped."""

import pytest
import torch
import torch.fx
from nxd_layers import ColumnParallelLinear, column_parallel_linears
from nxd_state import get_tensor_model_parallel_rank
from torch import nn

SIZES = (8, 4, 12)  # query, key and value of different lengths


def make_layers(sequence_dim=None, *, bias=True, **arguments):
    torch.manual_seed(3)
    return [
        ColumnParallelLinear(
            6,
            size,
            bias=bias,
            sequence_parallel_enabled=sequence_dim is not None,
            dtype=torch.float64,
            sequence_dimension=sequence_dim or 0,
            **{"gather_output": False, **arguments},
        )
        for size in SIZES
    ]


def make_input(sequence_dim=None):
    """The same on every rank, or, in a sequence-parallel region, each rank's own."""
    torch.manual_seed(7 if sequence_dim is None else 7 + get_tensor_model_parallel_rank())
    return torch.randn(4, 2, 6, dtype=torch.float64, requires_grad=True)


def backward_of(outputs):
    """Calls backward with another gradient for each output; every rank has its own."""
    torch.manual_seed(11 + get_tensor_model_parallel_rank())
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


@pytest.mark.pairs
@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_of_a_shared_input_give_the_numbers_of_separate_layers(
    on_tp, assert_same, tp, sequence_dim, bias, gather_output
):
    def job():
        together = make_layers(sequence_dim, bias=bias, gather_output=gather_output)
        apart = make_layers(sequence_dim, bias=bias, gather_output=gather_output)
        input_together, input_apart = make_input(sequence_dim), make_input(sequence_dim)

        outputs = column_parallel_linears(input_together, together)
        expected = tuple(layer(input_apart) for layer in apart)
        backward_of(outputs)
        backward_of(expected)

        for output, one in zip(outputs, expected, strict=True):
            assert_same(output, one)
        assert_same(input_together.grad, input_apart.grad)
        for layer, one in zip(together, apart, strict=True):
            for parameter, other in zip(layer.parameters(), one.parameters(), strict=True):
                assert_same(parameter.grad, other.grad)

    on_tp(tp, job)


def test_layers_of_a_shared_input_when_one_output_is_unused_give_the_others_gradients(on_tp, assert_same):
    def job():
        together, apart = make_layers(), make_layers()
        input_together, input_apart = make_input(), make_input()
        backward_of(column_parallel_linears(input_together, together)[:2])
        backward_of([layer(input_apart) for layer in apart[:2]])
        assert_same(input_together.grad, input_apart.grad)
        assert torch.count_nonzero(together[2].weight.grad) == 0

    on_tp(2, job)


@pytest.mark.parametrize(
    ("sequence_dim", "forward", "backward"),
    # gloo has no reduce-scatter worth using: nxd-state exchanges the parts and sums them itself.
    [(None, [], ["c10d::allreduce_"]), (0, ["c10d::_allgather_base_"], ["c10d::alltoall_base_"])],
)
def test_layers_of_a_shared_input_communicate_once_per_direction(on_tp, collectives, sequence_dim, forward, backward):
    def job():
        layers, input_, outputs = make_layers(sequence_dim), make_input(sequence_dim), []
        in_forward = collectives(lambda: outputs.extend(column_parallel_linears(input_, layers)))
        in_backward = collectives(lambda: backward_of(outputs))
        return in_forward, in_backward

    assert on_tp(2, job) == [(forward, backward)] * 2


@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_input_gradient_is_on_its_way_while_the_weight_gradients_are_computed(on_tp, operations, sequence_dim):
    def job():
        outputs = column_parallel_linears(make_input(sequence_dim), make_layers(sequence_dim))
        shown = {"aten::mm": "matmul", "aten::addmm_": "matmul", "wait": "wait"}
        shown |= {"c10d::allreduce_": "start", "c10d::alltoall_base_": "start"}
        return [shown[name] for name in operations(lambda: backward_of(outputs)) if name in shown]

    input_gradient, weight_gradients = ["matmul"] * 3, ["matmul"] * 3
    assert on_tp(2, job) == [[*input_gradient, "start", *weight_gradients, "wait"]] * 2


def test_input_without_grad_needs_no_collective_backward(on_tp, collectives):
    def job():
        outputs = column_parallel_linears(make_input().detach(), make_layers())
        return collectives(lambda: backward_of(outputs))

    assert on_tp(2, job) == [[], []]


@pytest.mark.parametrize("sequence_dim", [None, 0])
def test_forward_hooks_of_layers_of_a_shared_input_see_and_replace_what_they_do_of_separate_ones(
    on_tp, assert_same, sequence_dim
):
    def job():
        layers, input_ = make_layers(sequence_dim), make_input(sequence_dim)
        plain = [output.detach() for output in column_parallel_linears(input_, layers)]
        seen = []
        layers[0].register_forward_hook(lambda layer, args, output: seen.append((args[0] is input_, output)))
        layers[1].register_forward_hook(lambda layer, args, output: 2 * output)
        layers[2].register_forward_pre_hook(lambda layer, args: (3 * args[0],))
        layers[2].bias.data.zero_()

        outputs = column_parallel_linears(input_, layers)

        assert seen[0] == (True, outputs[0])
        assert_same(outputs[0], plain[0])
        assert_same(outputs[1], 2 * plain[1])
        assert_same(outputs[2], layers[2](input_))
        assert_same(outputs[2], 3 * (plain[2] - make_layers(sequence_dim)[2].bias))

    on_tp(2, job)


def test_module_or_forward_in_the_place_of_one_of_a_layer_of_a_shared_input_is_called(on_tp, assert_same):
    def job():
        layers, input_ = make_layers(), make_input()
        plain = column_parallel_linears(input_, layers)
        wrapped, forward = nn.Sequential(layers[1], nn.ReLU()), layers[2].forward
        layers[2].forward = lambda hidden: 2 * forward(hidden)
        outputs = column_parallel_linears(input_, [layers[0], wrapped, layers[2]])
        for output, expected in zip(outputs, [plain[0], plain[1].relu(), 2 * plain[2]], strict=True):
            assert_same(output, expected)

    on_tp(2, job)


def test_layers_that_expect_different_inputs_raise(on_tp):
    def job():
        layers = [ColumnParallelLinear(6, 8), ColumnParallelLinear(6, 8, sequence_parallel_enabled=True)]
        with pytest.raises(ValueError, match="layers that share an input must expect the same one"):
            column_parallel_linears(torch.ones(2, 6), layers)

    on_tp(2, job)


def test_trace_of_layers_of_a_shared_input_calls_each_of_them():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (ColumnParallelLinear(4, 6, gather_output=False) for _ in range(2))

        def forward(self, x):
            gate, up = column_parallel_linears(x, [self.gate, self.up])
            return gate * up

    block, x = Block(), torch.randn(3, 4)
    traced = torch.fx.symbolic_trace(block)

    assert torch.equal(traced(x), block(x))
    assert {name for name, _ in traced.named_parameters()} == {name for name, _ in block.named_parameters()}
