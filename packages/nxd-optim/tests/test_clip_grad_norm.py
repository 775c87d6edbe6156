"""Clipping scales every gradient of the model by one factor, taken from the norm of the whole."""

import math

import pytest
import torch
from nxd_optim import clip_grad_norm
from nxd_state import get_group, initialize_model_parallel, set_shard_spec, shard_along
from torch import nn

EPSILON = 1e-6


def with_gradient(values, dtype=torch.float64):
    parameter = nn.Parameter(torch.zeros(torch.tensor(values).shape, dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


@pytest.mark.parametrize(("max_norm", "scale"), [(2.5, 2.5 / (5 + EPSILON)), (1, 1 / (5 + EPSILON)), (0, 0)])
def test_clip_above_max_norm_scales_by_max_norm_over_norm(max_norm, scale):
    parameters = [with_gradient([3.0, 0.0]), with_gradient([-4.0])]

    norm = clip_grad_norm(parameters, max_norm)

    assert norm.shape == ()
    assert float(norm) == 5
    assert parameters[0].grad.tolist() == pytest.approx([3 * scale, 0], rel=1e-14)
    assert parameters[1].grad.tolist() == pytest.approx([-4 * scale], rel=1e-14)


@pytest.mark.parametrize("max_norm", [5.1, 100, float("inf")])
def test_clip_below_max_norm_changes_nothing(max_norm):
    parameter = with_gradient([0.3, -0.4])
    before = parameter.grad.clone()

    norm = clip_grad_norm(parameter, max_norm)

    assert float(norm) == pytest.approx(0.5)
    assert torch.equal(parameter.grad, before)


@pytest.mark.parametrize("norm_type", [1, 2, 3, 0.5, float("inf"), "inf"])
def test_clip_agrees_with_torch_in_one_process(norm_type):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (7,), (), (2, 2, 2)]
    ours, theirs = ([nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes] for _ in range(2))
    for parameter, other in zip(ours, theirs, strict=True):
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        other.grad = parameter.grad.clone()

    norm = clip_grad_norm(ours, 0.7, norm_type)

    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7, float(norm_type))
    assert float(norm) == pytest.approx(float(expected), rel=1e-12)
    for parameter, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm_type", [2, "inf"])
@pytest.mark.parametrize("kind", ["tensor", "list", "generator"])
def test_clip_takes_a_tensor_a_list_or_a_generator_with_repeats_and_missing_gradients(kind, norm_type):
    parameter = with_gradient([0.0, 10.0])
    without = nn.Parameter(torch.ones(3))
    parameters = {
        "tensor": parameter,
        "list": [parameter, without, parameter],
        "generator": (p for p in (without, parameter, parameter)),
    }[kind]

    norm = clip_grad_norm(parameters, 1.0, norm_type)

    assert float(norm) == 10
    assert parameter.grad.tolist() == pytest.approx([0, 1], rel=1e-6)
    assert without.grad is None


def test_clip_of_no_gradients_is_zero():
    assert float(clip_grad_norm([], 1.0)) == 0
    assert float(clip_grad_norm([nn.Parameter(torch.ones(2))], 0.0)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clip_of_half_precision_gradients_keeps_their_dtype_and_scales_all_alike(dtype):
    parameters = [with_gradient([2.0] * 10_000, dtype), with_gradient([4.0] * 10_000, torch.float32)]

    norm = clip_grad_norm(parameters, 1.0)

    assert float(norm) == pytest.approx((4 * 10_000 + 16 * 10_000) ** 0.5)
    assert [p.grad.dtype for p in parameters] == [dtype, torch.float32]
    assert parameters[1].grad[0].item() == pytest.approx(4 / float(norm), rel=1e-5)
    assert parameters[0].grad[0].item() == pytest.approx(2 / float(norm), rel=2**-7)


@pytest.mark.parametrize("make_contiguous", [True, False])
def test_clip_scales_gradients_in_place(make_contiguous):
    parameter = with_gradient([[3.0, 4.0], [0.0, 0.0]])
    gradient = parameter.grad if make_contiguous else parameter.grad.t()
    parameter.grad = gradient

    clip_grad_norm(parameter, 1.0)

    assert parameter.grad is gradient
    assert float(torch.linalg.vector_norm(gradient)) == pytest.approx(1, rel=1e-6)


def test_clip_with_a_gradient_that_is_not_finite_shows_in_the_norm():
    assert math.isinf(clip_grad_norm(with_gradient([float("inf"), 1.0]), 1.0))
    assert math.isnan(clip_grad_norm(with_gradient([float("nan"), 1.0]), 1.0))


def test_clip_to_an_infinite_norm_changes_no_gradient():
    parameter = with_gradient([float("inf"), 1.0])

    assert math.isinf(clip_grad_norm(parameter, math.inf))

    assert parameter.grad.tolist() == [math.inf, 1]


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_clip_to_a_bad_max_norm_raises_and_changes_nothing(max_norm):
    parameter = with_gradient([3.0])

    with pytest.raises(ValueError, match=f"max_norm={max_norm} must be zero or more"):
        clip_grad_norm(parameter, max_norm)

    assert parameter.grad.tolist() == [3]


def test_clip_with_a_bad_norm_type_raises():
    with pytest.raises(ValueError, match="norm_type=-2 must be a positive number"):
        clip_grad_norm(with_gradient([3.0]), 1.0, -2)


@pytest.mark.parametrize("norm_type", [2, "inf"])
def test_clip_scales_all_parts_of_a_model_by_the_norm_of_the_whole(run_ranks, norm_type):
    """Two stages of two tensor-parallel ranks: a shard and a whole parameter each, and a weight tied over stages."""

    def clip():
        initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        stage, tp_rank = get_group("pp").rank, get_group("tp").rank
        shard, whole, tied = with_gradient([1.0 + tp_rank + 2 * stage]), with_gradient([5.0]), with_gradient([6.0])
        set_shard_spec(shard, shard_along((2,), 0, rank=tp_rank, size=2))
        tied.shared = stage == 1
        norm = clip_grad_norm([shard, whole, tied], 1.0, norm_type)
        return float(norm), shard.grad.item(), whole.grad.item(), tied.grad.item()

    results = run_ranks(clip, 4)

    logical = torch.tensor([1.0, 2, 3, 4, 5, 5, 6], dtype=torch.float64)
    norm = float(torch.linalg.vector_norm(logical, float(norm_type)))
    scale = 1 / (norm + EPSILON)
    for index, result in enumerate(results):  # ranks are in order of stage, then tensor-parallel rank
        assert result == pytest.approx((norm, (1 + index) * scale, 5 * scale, 6 * scale), rel=1e-12)
