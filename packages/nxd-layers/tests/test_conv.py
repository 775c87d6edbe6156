"""Channel-parallel convolutions against `nn.Conv2d` in one process, in float64."""

import pytest
import torch
from nxd_layers import InputChannelParallelConv2d, OutputChannelParallelConv2d, scatter_to_tensor_model_parallel_region
from torch import nn

KINDS = [OutputChannelParallelConv2d, InputChannelParallelConv2d]
SHAPES = [
    {"kernel_size": 3},
    {"kernel_size": (3, 1), "stride": (2, 1), "padding": 1},
    {"kernel_size": 2, "dilation": 2, "bias": False},
]


def pair(kind, in_channels, out_channels, **arguments):
    """`nn.Conv2d`, and the layer with the same initial weights."""
    shape = {name: value for name, value in arguments.items() if name in SHAPES[1] | SHAPES[2]}
    torch.manual_seed(0)
    plain = nn.Conv2d(in_channels, out_channels, **shape).double()
    torch.manual_seed(0)
    return plain, kind(in_channels, out_channels, **arguments, dtype=torch.float64)


@pytest.fixture
def check_against_conv(logical, assert_same):
    def check(plain, layer, *, in_parallel=False):
        torch.manual_seed(1)
        image = torch.randn(2, plain.in_channels, 6, 5, dtype=torch.float64)
        whole, own = image.clone().requires_grad_(), image.clone().requires_grad_()
        given = scatter_to_tensor_model_parallel_region(own, 1) if in_parallel else own
        output, expected = layer(given), plain(whole)
        assert_same(output, expected)
        grad = torch.randn_like(expected)
        output.backward(grad)
        expected.backward(grad)
        assert_same(own.grad, whole.grad)
        for name, parameter in plain.named_parameters():
            ours = getattr(layer, name)
            assert_same(logical(ours), parameter)
            assert_same(logical(ours, ours.grad), parameter.grad)

    return check


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_parallel_conv_equals_conv(on_tp, check_against_conv, tp, kind, shape):
    on_tp(tp, lambda: check_against_conv(*pair(kind, 4, 6, **shape)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_parallel_conv_of_one_image_without_a_batch_equals_conv(on_tp, assert_same, tp, kind):
    def job():
        plain, layer = pair(kind, 4, 6, kernel_size=3)
        image = torch.randn(4, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert_same(layer(image), plain(image))

    on_tp(tp, job)


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_conv_of_channels_that_do_not_divide_is_padded(on_tp, check_against_conv, kind):
    on_tp(2, lambda: check_against_conv(*pair(kind, 3, 5, kernel_size=3, partition_pad=True)))


def test_two_parallel_convs_pass_their_channels_on(on_tp, assert_same):
    def job():
        first_plain, first = pair(OutputChannelParallelConv2d, 3, 4, kernel_size=3, gather_output=False)
        second_plain, second = pair(InputChannelParallelConv2d, 4, 2, kernel_size=3, input_is_parallel=True)
        image = torch.randn(1, 3, 6, 6, dtype=torch.float64)
        between = first(image)
        assert between.shape[1] == 2
        assert_same(second(between), second_plain(first_plain(image)))

    on_tp(2, job)


@pytest.mark.parametrize("kind", [OutputChannelParallelConv2d, InputChannelParallelConv2d])
def test_master_kernel_and_bias_are_the_whole_initial_ones(on_tp, assert_same, logical, kind):
    def job():
        layer = kind(2, 4, 3, keep_master_weight=True)
        assert_same(layer.master_weight, logical(layer.weight))
        assert_same(layer.master_bias, logical(layer.bias))
        assert set(layer.state_dict()) == {"weight", "bias"}
        assert kind(2, 4, 3, bias=False, keep_master_weight=True).master_bias is None
        assert kind(2, 4, 3).master_bias is None

    on_tp(2, job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 2}, "groups=2: only groups=1"),
        ({"padding_mode": "reflect"}, "padding_mode='reflect': only 'zeros'"),
        ({"out_channels": 5}, "2 shards do not divide dim 0"),
    ],
)
def test_conv_that_cannot_be_split_raises(on_tp, arguments, message):
    def job():
        with pytest.raises(ValueError, match=message):
            OutputChannelParallelConv2d(**{"in_channels": 4, "out_channels": 4, "kernel_size": 3, **arguments})

    on_tp(2, job)
