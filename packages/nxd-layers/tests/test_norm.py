"""`RMSNorm` and `LayerNorm` against torch's."""

import pytest
import torch
from nxd_layers import LayerNorm, RMSNorm
from torch import nn
from torch.nn import functional as F


def random_weights(norm):
    """Gives every parameter random values, so that it matters."""
    torch.manual_seed(4)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def rms_norm_formula(hidden, weight, eps):
    return hidden / torch.sqrt(hidden.square().mean(dim=-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (3, 2, 8), (2, 3, 2, 8), (0, 8)])
def test_rms_norm_equals_torch(shape, eps, assert_same):
    norm = random_weights(RMSNorm(8, eps, dtype=torch.float64))
    weight = norm.weight.detach().clone().requires_grad_()
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected_hidden = hidden.detach().clone().requires_grad_()
    grad = torch.randn(shape, dtype=torch.float64)

    output = norm(hidden)
    output.backward(grad)
    expected = F.rms_norm(expected_hidden, (8,), weight, eps)
    expected.backward(grad)

    assert_same(output, expected)
    assert_same(output, rms_norm_formula(hidden, weight, eps))
    assert_same(hidden.grad, expected_hidden.grad)
    assert_same(norm.weight.grad, weight.grad)


def test_rms_norm_non_contiguous_input_and_gradient_equal_torch(assert_same):
    norm = random_weights(RMSNorm(8, dtype=torch.float64))
    weight = norm.weight.detach().clone().requires_grad_()
    hidden = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    expected_hidden = hidden.detach().clone().requires_grad_()

    norm(hidden.t()).sum().backward()
    F.rms_norm(expected_hidden.t(), (8,), weight, norm.eps).sum().backward()

    assert_same(hidden.grad, expected_hidden.grad)
    assert_same(norm.weight.grad, weight.grad)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_of_shorter_dtypes_is_computed_in_float32(dtype, weight_dtype):
    norm = random_weights(RMSNorm(64, dtype=weight_dtype))
    hidden = (200 * torch.randn(9, 64)).to(dtype).requires_grad_()  # the squares overflow in float16
    grad = torch.randn(9, 64).to(dtype)
    wide_hidden = hidden.detach().float().requires_grad_()
    wide_weight = norm.weight.detach().float().requires_grad_()

    output = norm(hidden)
    output.backward(grad)
    expected = rms_norm_formula(wide_hidden, wide_weight, norm.eps)
    expected.backward(grad.float())

    def assert_rounded_once(actual, exact, to):
        assert actual.dtype == to
        torch.testing.assert_close(actual.float(), exact, rtol=torch.finfo(to).eps, atol=1e-5)

    assert_rounded_once(output.detach(), expected.detach(), dtype)
    assert_rounded_once(hidden.grad, wide_hidden.grad, dtype)
    assert_rounded_once(norm.weight.grad, wide_weight.grad, weight_dtype)


@pytest.mark.parametrize("learns", ["hidden", "weight"])
def test_rms_norm_with_one_frozen_side_gives_the_other_its_gradient(learns, assert_same):
    norm = random_weights(RMSNorm(8, dtype=torch.float64))
    hidden = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    norm(hidden).square().sum().backward()
    expected = {"hidden": hidden.grad, "weight": norm.weight.grad}[learns]

    frozen = random_weights(RMSNorm(8, dtype=torch.float64)).requires_grad_(learns == "weight")
    other = hidden.detach().clone().requires_grad_(learns == "hidden")
    frozen(other).square().sum().backward()

    assert_same({"hidden": other, "weight": frozen.weight}[learns].grad, expected)
    assert {"hidden": frozen.weight, "weight": other}[learns].grad is None


def test_rms_norm_does_not_change_its_input_or_gradient():
    norm = random_weights(RMSNorm(8))
    hidden, grad = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    before = [tensor.detach().clone() for tensor in (hidden, grad, norm.weight)]
    norm(hidden).backward(grad)
    for tensor, value in zip((hidden, grad, norm.weight), before, strict=True):
        assert torch.equal(tensor, value)


def test_rms_norm_starts_at_ones_and_returns_to_them():
    norm = RMSNorm(8)
    assert torch.equal(norm.weight, torch.ones(8))
    random_weights(norm).reset_parameters()
    assert torch.equal(norm.weight, torch.ones(8))


@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_equals_torch(affine, assert_same):
    arguments = {"eps": 0.1, "elementwise_affine": affine, "dtype": torch.float64}
    norm, expected = (random_weights(kind(8, **arguments)) for kind in (LayerNorm, nn.LayerNorm))
    hidden = torch.randn(3, 2, 8, dtype=torch.float64)
    assert_same(norm(hidden), expected(hidden))


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_parameters_say_whether_their_gradients_are_partial(kind, enabled):
    norm = kind(8, sequence_parallel_enabled=enabled)
    assert [p.sequence_parallel_enabled for p in norm.parameters()] == [enabled] * len(list(norm.parameters()))


@pytest.mark.pairs
@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("tp", [2, 4])
def test_norm_of_a_part_of_the_sequence_gives_summed_gradients_equal_to_the_whole(
    on_tp, summed_grad, assert_same, tp, kind, sequence_dim
):
    from nxd_layers import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

    def job():
        whole, parted = (
            random_weights(kind(6, sequence_parallel_enabled=enabled, dtype=torch.float64)) for enabled in (False, True)
        )
        hidden = torch.randn(4, 4, 6, dtype=torch.float64)
        expected = whole(hidden)
        expected.square().sum().backward()

        part = parted(scatter_to_sequence_parallel_region(hidden, sequence_dim))
        part.square().sum().backward()

        assert_same(gather_from_sequence_parallel_region(part, sequence_dim), expected)
        for parameter, one in zip(parted.parameters(), whole.parameters(), strict=True):
            assert_same(summed_grad(parameter), one.grad)

    on_tp(tp, job)
