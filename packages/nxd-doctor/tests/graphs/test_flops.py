import pytest
from nxd_doctor.graphs import count_flops, find_products, parse_hlo


def test_flops_of_a_step_are_those_of_the_closed_formula(torch_xla_step):
    rows, hidden, inner = 5, 8, 16
    forward = 2 * rows * hidden * inner * 2
    backward = 2 * forward - 2 * rows * hidden * inner  # the input of the first layer needs no gradient

    assert count_flops(parse_hlo(torch_xla_step)) == forward + backward


def test_flops_do_not_change_by_compiling(compiled_step):
    forward = 2 * 5 * (8 * 16 + 16 * 4)

    assert count_flops(parse_hlo(compiled_step)) == 2 * forward + 2 * 5 * 16 * 4


def test_batched_dot_counts_each_batch(module_of):
    module = module_of(
        "q = f32[2,3,7,4] parameter(0)",
        "k = f32[2,3,5,4] parameter(1)",
        "s = f32[2,3,7,5] dot(q, k), lhs_batch_dims={0,1}, rhs_batch_dims={0,1}, lhs_contracting_dims={3}, "
        "rhs_contracting_dims={3}",
    )

    assert count_flops(module) == 2 * (2 * 3) * (7 * 5) * 4


@pytest.mark.parametrize(("groups", "in_channels"), [(1, 6), (2, 3)])
def test_convolution_counts_kernel_and_channels(module_of, groups, in_channels):
    module = module_of(
        "x = f32[2,6,8,8] parameter(0)",
        f"w = f32[10,{in_channels},3,3] parameter(1)",
        f"y = f32[2,10,8,8] convolution(x, w), window={{size=3x3 pad=1_1x1_1}}, dim_labels=bf01_oi01->bf01, "
        f"feature_group_count={groups}",
    )

    assert count_flops(module) == 2 * (2 * 10 * 8 * 8) * (in_channels * 3 * 3)


def test_products_say_where_they_are_from(torch_xla_step):
    products = find_products(parse_hlo(torch_xla_step))

    assert [(product.place, product.dtype) for product in products[:2]] == [("0.up", "bf16"), ("0.down", "bf16")]
