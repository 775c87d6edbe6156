"""Products with the weights of experts, by torch's grouped product where it is taken, against a loop over tokens."""

import pytest
import torch
from nxd_layers.experts import ExpertMLPs


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
        inner = mlps.mlp_op.up_proj(tokens, [3, 0, 2, 1])

    assert inner.dtype == torch.bfloat16
    assert products(mlps, tokens, chosen).dtype == torch.float32


def test_gradient_of_a_sum_which_is_expanded_is_taken():
    mlps = ExpertMLPs(4, 1, 8, 16, hidden_act="relu", glu_mlp=False)

    mlps.mlp_op.up_proj(torch.ones(6, 8), [3, 0, 2, 1]).sum().backward()

    assert mlps.mlp_op.up_proj.weight.grad.sum(dim=(1, 2)).tolist() == [3 * 8 * 16, 0, 2 * 8 * 16, 8 * 16]
