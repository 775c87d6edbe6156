"""The gradient norm of a model in any layout is that of the logical gradients in one process."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from nxd_optim import grad_norm
from nxd_state import (
    Box,
    ShardPiece,
    ShardSpec,
    fuse_along,
    get_group,
    initialize_model_parallel,
    set_shard_spec,
    shard_along,
)
from torch import nn

POWERS = [1, 2, 3, 0.5, float("inf"), "inf"]
PADDING = 1e6  # what stands where no logical element is; it must not count


def logical_gradients():
    """The gradients of the unsharded model, by name."""
    shapes = {
        "column": (8, 6),
        "column.bias": (8,),
        "row": (5, 8),
        "gate_up": (16, 3),
        "vocabulary": (10, 4),
        "q": (8, 4),
        "k": (4, 4),
        "v": (4, 4),
        "norm": (6,),
        "scale": (),
    }
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def fused_qkv(rank, size):
    """Heads of 2 rows; four of q, two of k and of v, which several ranks hold where there are more than two ranks."""
    copies = max(1, size // 2)
    kv = {"rank": rank // copies, "size": size // copies, "copies": copies}
    q = shard_along((8, 4), 0, rank=rank, size=size, name="q")
    return fuse_along([q, *(shard_along((4, 4), 0, name=name, **kv) for name in "kv")], 0)


def local_parameter(spec, name, logical):
    """A parameter with the gradient that a rank has of it; `spec` None: whole."""
    if spec is None:
        parameter = nn.Parameter(torch.zeros_like(logical[name]))
        parameter.grad = logical[name].clone()
        return parameter
    parameter = nn.Parameter(torch.zeros(spec.local_shape, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, PADDING)
    spec.copy_from_logical({relative: logical[relative or name] for relative in spec.logical_shapes}, parameter.grad)
    set_shard_spec(parameter, spec)
    return parameter


def tensor_parallel_parameters():
    """This tensor-parallel rank's part of all logical tensors."""
    logical, tp = logical_gradients(), get_group("tp")
    here = {"rank": tp.rank, "size": tp.size}
    specs = {
        "column": shard_along((8, 6), 0, **here),
        "column.bias": shard_along((8,), 0, **here),
        "row": shard_along((5, 8), 1, **here),
        "gate_up": shard_along((16, 3), 0, stride=2, **here),
        "vocabulary": shard_along((10, 4), 0, padded_length=12, **here),
        "qkv": fused_qkv(tp.rank, tp.size),
        "norm": None,
        "scale": None,
    }
    return [local_parameter(spec, name, logical) for name, spec in specs.items()]


def norm_of(tensors, power):
    return float(torch.linalg.vector_norm(torch.cat([t.reshape(-1).double() for t in tensors]), float(power)))


def with_gradient(values, dtype=torch.float32):
    parameter = nn.Parameter(torch.zeros(torch.tensor(values).shape, dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


@pytest.mark.sample(4)
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_norm_of_sharded_fused_padded_and_replicated_parameters_counts_each_element_once(run_ranks, ranks, power):
    def measure():
        initialize_model_parallel(tensor_model_parallel_size=ranks)
        return float(grad_norm(tensor_parallel_parameters(), power))

    results = run_ranks(measure, ranks)

    assert len(set(results)) == 1
    assert results[0] == pytest.approx(norm_of(logical_gradients().values(), power), rel=1e-12)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_norm_over_stages_adds_their_parameters_and_counts_tied_weights_once(run_ranks, tensor_parallel, power):
    def measure():
        initialize_model_parallel(tensor_model_parallel_size=tensor_parallel, pipeline_model_parallel_size=2)
        stage = get_group("pp").rank
        parameters = tensor_parallel_parameters()
        tied = parameters[4]  # the vocabulary
        if stage == 0:
            chosen = [tied, *parameters[:3]]
        else:
            tied.shared = True
            chosen = [*parameters[3:]]
        return float(grad_norm(chosen, power))

    results = run_ranks(measure, 2 * tensor_parallel)

    assert len(set(results)) == 1
    assert results[0] == pytest.approx(norm_of(logical_gradients().values(), power), rel=1e-12)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norm_where_one_stage_has_no_gradients_is_that_of_the_other(run_ranks, power, dtype):
    def measure():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        parameter = with_gradient([3.0, -4.0], dtype)
        if get_group("pp").rank == 1:
            parameter.grad = None
        return float(grad_norm([parameter], power))

    assert run_ranks(measure, 2) == [pytest.approx(norm_of([torch.tensor([3.0, -4.0])], power), rel=1e-6)] * 2


def test_norm_where_ranks_hold_different_dtypes_adds_them(run_ranks):
    def measure():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        return float(grad_norm(with_gradient([3.0], (torch.float64, torch.float32)[get_group("pp").rank])))

    assert run_ranks(measure, 2) == [pytest.approx(18**0.5)] * 2


@pytest.mark.parametrize("power", [2, "inf"])
def test_norm_with_a_nan_on_one_rank_is_nan_on_all(run_ranks, power):
    def measure():
        initialize_model_parallel(pipeline_model_parallel_size=4)
        value = float("nan") if get_group("pp").rank == 2 else 5.0
        return bool(grad_norm(with_gradient([value, 1.0]), power).isnan())

    assert run_ranks(measure, 4) == [True] * 4


def test_norm_of_replicas_is_not_added(run_ranks):
    def measure():
        initialize_model_parallel()
        return float(grad_norm(with_gradient([3.0, 4.0])))

    assert run_ranks(measure, 2) == [5.0, 5.0]


PIECES = st.sampled_from(["whole", "rows", "columns", "strided", "padded", "copies"])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(PIECES, max_size=5), power=st.sampled_from(POWERS), seed=st.integers(0, 100))
def test_norm_of_any_mixture_of_layouts_is_that_of_the_logical_gradients(run_ranks, kinds, power, seed):
    def logical():
        generator = torch.Generator().manual_seed(seed)
        shapes = {"padded": (6, 4), "copies": (4, 2)}
        tensors = [torch.randn(shapes.get(k, (8, 4)), generator=generator, dtype=torch.float64) for k in kinds]
        return dict(enumerate(tensors))

    def measure():
        initialize_model_parallel(tensor_model_parallel_size=4)
        rank = get_group("tp").rank
        specs = {
            "whole": None,
            "rows": shard_along((8, 4), 0, rank=rank, size=4),
            "columns": shard_along((8, 4), 1, rank=rank, size=4),
            "strided": shard_along((8, 4), 0, rank=rank, size=4, stride=2),
            "padded": shard_along((6, 4), 0, rank=rank, size=4, padded_length=8),
            "copies": shard_along((4, 2), 0, rank=rank // 2, size=2, copies=2),
        }
        tensors = logical()
        return float(grad_norm((local_parameter(specs[kind], i, tensors) for i, kind in enumerate(kinds)), power))

    results = run_ranks(measure, 4)

    expected = norm_of(logical().values(), power) if kinds else 0.0
    assert results == [pytest.approx(expected, rel=1e-12)] * 4


@pytest.mark.parametrize("power", POWERS)
def test_norm_takes_a_tensor_a_list_or_a_generator(power):
    first, second = with_gradient([[3.0, -4.0]]), with_gradient([12.0])

    expected = pytest.approx(norm_of([first.grad, second.grad], power), rel=1e-6)
    assert float(grad_norm([first, second], power)) == expected
    assert float(grad_norm((p for p in (first, second)), power)) == expected
    assert float(grad_norm(nn.ParameterList([first, second]).parameters(), power)) == expected
    assert float(grad_norm(first, power)) == pytest.approx(norm_of([first.grad], power), rel=1e-6)


@pytest.mark.parametrize("power", POWERS)
def test_norm_counts_a_repeated_parameter_once_and_those_without_gradient_not_at_all(power):
    repeated, without, empty = with_gradient([3.0, 4.0]), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0, 2))
    empty.grad = torch.zeros(0, 2)

    norm = grad_norm([repeated, without, repeated, empty], power)

    assert float(norm) == pytest.approx(norm_of([repeated.grad], power), rel=1e-6)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.ones(2))]], ids=["no parameters", "no gradients"])
def test_norm_of_nothing_is_zero(parameters, power):
    norm = grad_norm(parameters, power)

    assert norm.shape == ()
    assert float(norm) == 0


@pytest.mark.parametrize("power", POWERS)
def test_norm_of_a_non_contiguous_gradient_is_that_of_its_elements(power):
    parameter = with_gradient([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    parameter.grad = torch.arange(12.0).view(4, 3)[::2].t()

    assert float(grad_norm(parameter, power)) == pytest.approx(norm_of([parameter.grad], power), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_half_precision_gradients_is_accumulated_in_float32(dtype):
    # In half precision the sum of squares would stop growing, or overflow.
    parameters = [with_gradient([8.0] * 10_000, dtype) for _ in range(30)]

    norm = grad_norm(parameters)

    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(8 * 300_000**0.5, rel=1e-6)


def test_norm_whose_sum_of_powers_exceeds_float32_is_finite():
    parameters = [with_gradient([1e12]) for _ in range(1000)]

    assert float(grad_norm(parameters, 3)) == pytest.approx(1e13, rel=1e-6)


@pytest.mark.parametrize("norm_type", [0, -1, "two", float("nan"), "-inf"])
def test_norm_of_a_bad_norm_type_raises(norm_type):
    with pytest.raises(ValueError, match=f"norm_type={norm_type!r} must be a positive number or 'inf'"):
        grad_norm(with_gradient([1.0]), norm_type)


def test_norm_of_a_parameter_sharded_along_another_axis_raises():
    parameter = with_gradient([1.0])
    box = Box((0,), (1,))
    set_shard_spec(parameter, ShardSpec((1,), (ShardPiece(box, box, (2,)),), axis="ep"))

    with pytest.raises(ValueError, match=r"shape \(1,\) is sharded along axis='ep'"):
        grad_norm(parameter)
