"""The regions: what each gives forward and backward on every rank, and that they change nothing of the caller's."""

import pytest
import torch
import torch.distributed as dist
from nxd_layers import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_state import get_tensor_model_parallel_rank as tp_rank
from nxd_state import initialize_model_parallel

SHAPE = (12, 12, 12)  # each dim splits over 2, 3 and 4 ranks


def of_rank(rank, shape=SHAPE):
    """A tensor of which every rank has another; any rank can make any other's."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sum_over_ranks(tp, shape=SHAPE):
    return sum(of_rank(rank, shape) for rank in range(tp))


def part(whole, tp, dim):
    return whole.chunk(tp, dim)[tp_rank()]


def joined(tp, dim, shape):
    return torch.cat([of_rank(rank, shape) for rank in range(tp)], dim)


def shape_of_part(tp, dim):
    shape = list(SHAPE)
    shape[dim] //= tp
    return tuple(shape)


def apply(region, input_, *, grad_shape, **arguments):
    """Output and input gradient, for an upstream gradient that differs from rank to rank."""
    leaf = input_.clone().requires_grad_()
    output = region(leaf, **arguments)
    output.backward(of_rank(50 + tp_rank(), grad_shape))
    return output, leaf.grad


def upstream_sum(tp, shape=SHAPE):
    return sum(of_rank(50 + rank, shape) for rank in range(tp))


def upstream_joined(tp, dim, shape):
    return torch.cat([of_rank(50 + rank, shape) for rank in range(tp)], dim)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_copy_is_the_identity_and_sums_gradients(on_tp, assert_same, tp):
    def job():
        output, grad = apply(copy_to_tensor_model_parallel_region, of_rank(0), grad_shape=SHAPE)
        assert_same(output, of_rank(0))
        assert_same(grad, upstream_sum(tp))

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_reduce_sums_and_passes_the_gradient_on(on_tp, assert_same, tp):
    def job():
        output, grad = apply(reduce_from_tensor_model_parallel_region, of_rank(tp_rank()), grad_shape=SHAPE)
        assert_same(output, sum_over_ranks(tp))
        assert_same(grad, of_rank(50 + tp_rank()))

    on_tp(tp, job)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_scatter_takes_the_own_part_and_gathers_gradients(on_tp, assert_same, tp, dim):
    def job():
        shape = shape_of_part(tp, dim)
        output, grad = apply(scatter_to_tensor_model_parallel_region, of_rank(0), grad_shape=shape, dim=dim)
        assert_same(output, part(of_rank(0), tp, dim))
        assert_same(grad, upstream_joined(tp, dim, shape))

    on_tp(tp, job)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_gather_joins_the_parts_and_takes_the_own_part_of_the_gradient(on_tp, assert_same, tp, dim):
    def job():
        shape = shape_of_part(tp, dim)
        region = gather_from_tensor_model_parallel_region
        output, grad = apply(region, of_rank(tp_rank(), shape), grad_shape=SHAPE, dim=dim)
        assert_same(output, joined(tp, dim, shape))
        assert_same(grad, part(of_rank(50 + tp_rank()), tp, dim))

    on_tp(tp, job)


@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_scatter_to_sequence_parallel_takes_the_own_part_and_gathers_gradients(on_tp, assert_same, tp, sequence_dim):
    def job():
        shape = shape_of_part(tp, sequence_dim)
        region = scatter_to_sequence_parallel_region
        output, grad = apply(region, of_rank(0), grad_shape=shape, sequence_dimension=sequence_dim)
        assert_same(output, part(of_rank(0), tp, sequence_dim))
        assert_same(grad, upstream_joined(tp, sequence_dim, shape))

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("to_model_parallel", [False, True])
@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_gather_from_sequence_parallel_joins_and_reduces_partial_gradients(
    on_tp, assert_same, tp, sequence_dim, to_model_parallel
):
    def job():
        shape = shape_of_part(tp, sequence_dim)
        output, grad = apply(
            gather_from_sequence_parallel_region,
            of_rank(tp_rank(), shape),
            grad_shape=SHAPE,
            sequence_dimension=sequence_dim,
            to_model_parallel=to_model_parallel,
        )
        assert_same(output, joined(tp, sequence_dim, shape))
        whole_grad = upstream_sum(tp) if to_model_parallel else of_rank(50 + tp_rank())
        assert_same(grad, part(whole_grad, tp, sequence_dim))

    on_tp(tp, job)


@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_reduce_scatter_to_sequence_parallel_sums_and_gathers_gradients(on_tp, assert_same, tp, sequence_dim):
    def job():
        shape = shape_of_part(tp, sequence_dim)
        region = reduce_scatter_to_sequence_parallel_region
        output, grad = apply(region, of_rank(tp_rank()), grad_shape=shape, sequence_dimension=sequence_dim)
        assert_same(output, part(sum_over_ranks(tp), tp, sequence_dim))
        assert_same(grad, upstream_joined(tp, sequence_dim, shape))

    on_tp(tp, job)


REGIONS = [
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
]


@pytest.mark.parametrize("region", REGIONS)
def test_region_does_not_change_its_input_or_gradient(on_tp, region):
    def job():
        input_ = of_rank(tp_rank()).requires_grad_()
        output = region(input_)
        grad = of_rank(50, output.shape)
        output.backward(grad)
        assert torch.equal(input_, of_rank(tp_rank()))
        assert torch.equal(grad, of_rank(50, output.shape))

    on_tp(2, job)


@pytest.mark.parametrize("region", REGIONS)
def test_region_of_non_contiguous_input_and_gradient_gives_the_same_numbers(on_tp, assert_same, region):
    def job():
        contiguous = of_rank(tp_rank()).transpose(0, 2).contiguous().requires_grad_()
        expected = region(contiguous)
        grad = of_rank(50 + tp_rank(), tuple(reversed(expected.shape)))
        expected.backward(grad.transpose(0, 2).contiguous())

        strided = of_rank(tp_rank()).requires_grad_()
        output = region(strided.transpose(0, 2))
        output.backward(grad.transpose(0, 2))
        assert_same(output, expected)
        assert_same(strided.grad.transpose(0, 2), contiguous.grad)

    on_tp(2, job)


def test_copy_plus_its_input_has_the_gradient_of_both_uses(on_tp, assert_same):
    def job():
        input_ = of_rank(0).requires_grad_()
        twice = input_ * 1.0
        (copy_to_tensor_model_parallel_region(twice) + twice).backward(torch.ones(SHAPE, dtype=torch.float64))
        assert_same(input_.grad, torch.full(SHAPE, 3.0, dtype=torch.float64))  # 2 ranks through the copy, and 1

    on_tp(2, job)


def test_reduce_plus_its_input_uses_the_input_as_it_was(on_tp, assert_same):
    def job():
        input_ = of_rank(tp_rank())
        assert_same(reduce_from_tensor_model_parallel_region(input_) + input_, sum_over_ranks(2) + of_rank(tp_rank()))

    on_tp(2, job)


@pytest.mark.sample(5)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_region_keeps_the_dtype(on_tp, region, dtype):
    def job():
        input_ = torch.ones(4, 4, dtype=dtype, requires_grad=True)
        output = region(input_)
        output.backward(torch.ones_like(output))
        assert (output.dtype, input_.grad.dtype) == (dtype, dtype)

    on_tp(2, job)


@pytest.mark.parametrize("region", REGIONS)
def test_region_without_a_mesh_is_the_identity(region):
    input_ = torch.randn(3, 5, requires_grad=True)
    output = region(input_)
    output.backward(torch.ones(3, 5))
    assert torch.equal(output, input_)
    assert torch.equal(input_.grad, torch.ones(3, 5))


@pytest.mark.parametrize("region", [scatter_to_tensor_model_parallel_region, scatter_to_sequence_parallel_region])
def test_scatter_of_a_dim_that_does_not_divide_raises(on_tp, region):
    def job():
        with pytest.raises(ValueError, match=r"size=2 does not divide dim [01] of shape \(5, 7\); pad it to [68]"):
            region(torch.ones(5, 7))

    on_tp(2, job)


@pytest.mark.parametrize("region", [scatter_to_sequence_parallel_region, gather_from_sequence_parallel_region])
def test_region_of_a_dim_that_is_not_there_raises(on_tp, region):
    def job():
        with pytest.raises(ValueError, match=r"dim=2 is outside a tensor of shape \(4, 4\)"):
            region(torch.ones(4, 4), 2)

    on_tp(2, job)


REGIONS = {
    copy_to_tensor_model_parallel_region: {},
    reduce_from_tensor_model_parallel_region: {},
    scatter_to_tensor_model_parallel_region: {"dim": -1},
    gather_from_tensor_model_parallel_region: {"dim": -1},
    scatter_to_sequence_parallel_region: {},
    gather_from_sequence_parallel_region: {},
    reduce_scatter_to_sequence_parallel_region: {},
}


def pairs_of(world_size):
    """A process group of this rank and its neighbour, which no mesh knows."""
    made = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    return made[dist.get_rank() // 2]


@pytest.mark.sample(4)
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_region_over_a_given_process_group_is_that_over_a_mesh_of_its_ranks(run_ranks, assert_same, region):
    def over(tp, **arguments):
        initialize_model_parallel(tensor_model_parallel_size=tp)
        group = pairs_of(4) if tp == 1 else None
        leaf = of_rank(dist.get_rank()).requires_grad_()
        output = region(leaf, process_group=group, **arguments)
        output.backward(of_rank(50 + dist.get_rank(), output.shape))
        return output, leaf.grad

    given, meshed = (run_ranks(over, 4, tp) for tp in (1, 2))

    for (output, grad), (expected, expected_grad) in zip(given, meshed, strict=True):
        assert_same(output, expected)
        assert_same(grad, expected_grad)


def test_region_over_what_is_no_process_group_says_what_to_give(on_tp):
    def job():
        with pytest.raises(
            ValueError, match=r"process_group='tp' is a str, not a process group of this rank.*new_group"
        ):
            gather_from_tensor_model_parallel_region(of_rank(0), process_group="tp")

    on_tp(2, job)


def test_gradient_of_a_reduce_scatter_travels_in_the_given_dtype(on_tp, assert_same):
    def job():
        leaf = torch.ones(2, 4, requires_grad=True)
        output = reduce_scatter_to_sequence_parallel_region(leaf, dtype=torch.bfloat16)
        output.backward(torch.full((1, 4), 1 + 2**-12))
        assert_same(leaf.grad, torch.ones(2, 4))  # the digits that bfloat16 lacks are gone

    on_tp(2, job)
