"""Products with the weights of experts, by torch's grouped product where it is taken, against a loop over tokens."""

import pytest
import torch
from nxd_layers.experts import ExpertMLPs
from nxd_layers.experts.linear import grouped_product
from nxd_testing import operations_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode


def products(mlps, tokens, expert):
    weights = torch.nn.functional.one_hot(expert, mlps.num_experts).to(tokens.dtype)
    return mlps(tokens, weights, expert.unsqueeze(1))


def by_hand(mlps, tokens, expert):
    up, down = mlps.mlp_op.up_proj.weight, mlps.mlp_op.down_proj.weight
    return torch.stack(
        [torch.relu(token @ up[it]) @ down[it] for token, it in zip(tokens, expert.tolist(), strict=True)]
    )


@pytest.mark.pairs
@pytest.mark.parametrize("expert", [[2, 0, 2, 3, 0, 0], [1] * 6, [3, 3, 0, 0, 3, 0]], ids=["some", "one", "outer"])
@pytest.mark.parametrize("intermediate", [16, 6], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_products_of_every_dtype_and_experts_without_tokens_are_those_of_a_loop(dtype, tolerance, intermediate, expert):
    torch.manual_seed(0)
    mlps = ExpertMLPs(4, 1, 8, intermediate, hidden_act="relu", glu_mlp=False, dtype=dtype)
    tokens, chosen = torch.randn(6, 8, dtype=dtype, requires_grad=True), torch.tensor(expert)
    leaves = [tokens, mlps.mlp_op.up_proj.weight, mlps.mlp_op.down_proj.weight]

    found = products(mlps, tokens, chosen)
    expected = by_hand(mlps, tokens, chosen)

    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for gradient, wanted in zip(
        torch.autograd.grad(found.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance)


def test_products_under_autocast_are_of_the_narrower_dtype():
    mlps = ExpertMLPs(4, 1, 8, 16, hidden_act="relu", glu_mlp=False)
    tokens, chosen = torch.randn(6, 8), torch.tensor([2, 0, 2, 3, 0, 0])

    with torch.autocast("cpu", torch.bfloat16):
        inner = mlps.mlp_op.up_proj(tokens, torch.tensor([3, 0, 2, 1]))

    assert inner.dtype == torch.bfloat16
    assert products(mlps, tokens, chosen).dtype == torch.float32


def test_gradient_of_a_sum_which_is_expanded_is_taken():
    mlps = ExpertMLPs(4, 1, 8, 16, hidden_act="relu", glu_mlp=False)

    mlps.mlp_op.up_proj(torch.ones(6, 8), torch.tensor([3, 0, 2, 1])).sum().backward()

    assert mlps.mlp_op.up_proj.weight.grad.sum(dim=(1, 2)).tolist() == [3 * 8 * 16, 0, 2 * 8 * 16, 8 * 16]


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="from torch 2.10 on")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu_multiplies_by_all_experts_at_once(dtype, caplog):
    if dtype != torch.bfloat16 and torch.__version__ < "2.15":
        pytest.skip("from torch 2.15 on")
    with FakeTensorMode():
        tokens = torch.empty(12, 16, dtype=dtype, device="cuda")
        weights = torch.empty(4, 16, 32, dtype=dtype, device="cuda")
        counts = torch.empty(4, dtype=torch.int64, device="cuda")
        seen = operations_of(lambda: grouped_product(tokens, weights, counts))

    assert "aten::_grouped_mm" in seen
    assert not {"aten::mm", "aten::cat"} & set(seen)
    assert not caplog.records


def test_gpu_that_loops_over_experts_says_so_and_what_would_be_faster(caplog):
    with FakeTensorMode():
        tokens, weights = torch.empty(12, 16, device="cuda"), torch.empty(4, 16, 7, device="cuda")
        counts = torch.empty(4, dtype=torch.int64, device="cuda")
        for _ in range(2):
            with pytest.raises(DataDependentOutputException):  # a loop has to know them
                grouped_product(tokens, weights, counts)

    (record,) = caplog.records
    assert "products of 4 experts one after the other" in record.message
    assert "[4, 16, 7]" in record.message
