"""Parts of mixture-of-experts layers that scripts for NeuronX Distributed make by themselves."""

import pytest
import torch
from neuronx_distributed.modules.moe import ExpertMLPs, MoE, RouterTopK
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuronx_distributed.modules.moe.model_utils import GLUType
from neuronx_distributed.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig, RouterConfig
from neuronx_distributed.modules.moe.moe_parallel_layers import (
    ExpertFusedColumnParallelLinear,
    ExpertFusedRowParallelLinear,
)
from neuronx_distributed.modules.moe.routing import GroupLimitedRouter
from neuronx_distributed.modules.moe.shared_experts import SharedExperts
from neuronx_distributed.modules.moe.token_shuffling import token_shuffle, token_unshuffle
from nxd_state import get_group, initialize_model_parallel
from torch.nn import functional as F


def tokens_of(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape).sin()


def config(**options):
    return RoutedExpertsMLPOpsConfig(4, 8, 12, top_k=2, hidden_act="silu", glu_mlp=True, capacity_factor=0.0, **options)


def layer_with_shared_experts(fused, sequence_parallel_enabled=False, **options):
    torch.manual_seed(0)
    router = RouterTopK(4, 2, 8, sequence_parallel_enabled, 0, torch.float64)
    mlps = ExpertMLPsV2(config(), BlockwiseMatmulConfig.from_kwargs(block_size=4), dtype=torch.float64)
    shared = SharedExperts(8, 6, 2, "silu", torch.float64, fused_gate_up_projection=fused, reduce_dtype=torch.float64)
    return MoE(router, mlps, shared, None, sequence_parallel_enabled, 0, **options)


@pytest.mark.parametrize("fused", [False, True])
def test_layer_with_shared_experts_computes_the_same_on_two_ranks(run_ranks, fused):
    def output(tp):
        initialize_model_parallel(tp)
        layer, tokens = layer_with_shared_experts(fused), tokens_of(6, 2, 8).requires_grad_()
        (result,) = layer(tokens)
        result.square().sum().backward()
        return result.detach(), tokens.grad, sorted(dict(layer.shared_experts.named_children()))

    (alone,) = run_ranks(output, 1, 1)

    for result, gradient, names in run_ranks(output, 2, 2):
        torch.testing.assert_close((result, gradient), alone[:2], rtol=1e-10, atol=1e-12)
        assert names == (["down_proj", "gate_up_proj"] if fused else ["down_proj", "gate_proj", "up_proj"])


@pytest.mark.parametrize("seed", [None, 7])
def test_layer_that_shuffles_tokens_over_replicas_gives_each_its_own(run_ranks, seed):
    def outputs():
        initialize_model_parallel(1)
        tokens = (tokens_of(4, 2, 8) + get_group("dp").rank).requires_grad_()
        plain, shuffling = (
            layer_with_shared_experts(True, token_shuffle_group_size=size, token_shuffle_seed=seed) for size in (1, 2)
        )
        results = []
        for layer in (plain, shuffling):
            (result,) = layer(tokens)
            results.append((result.detach(), *torch.autograd.grad(result.square().sum(), tokens)))
        torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)
        shuffled, permutation = token_shuffle(tokens, seed)
        assert torch.equal(token_unshuffle(shuffled, permutation), tokens)
        return shuffled.detach().flatten(0, 1), tokens.detach().flatten(0, 1)

    (first, first_tokens), (second, second_tokens) = run_ranks(outputs, 2)
    dealt, before = torch.cat([first, second]), torch.cat([first_tokens, second_tokens])
    assert not torch.equal(dealt, before)
    assert torch.equal(dealt.sort(dim=0).values, before.sort(dim=0).values)
    own = torch.tensor([any(torch.equal(row, it) for it in first_tokens) for row in first])
    assert own.sum() == len(own) // 2  # as many from each replica


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2)])
def test_linear_layers_of_all_experts_compute_the_same_over_ranks(run_ranks, tp, ep):
    def output(tp, ep):
        initialize_model_parallel(tp, 1, ep)
        torch.manual_seed(1)
        up = ExpertFusedColumnParallelLinear(4, 8, 12, dtype=torch.float64)
        down = ExpertFusedRowParallelLinear(4, 12, 8, dtype=torch.float64)
        group = get_group("ep")
        tokens = tokens_of(4, 3, 8).chunk(group.size)[group.rank].clone().requires_grad_()  # of this rank's experts
        result = down(up(tokens).relu())
        result.square().sum().backward()
        down.reduce_output = False
        return result.detach(), tokens.grad, down(up(tokens).relu()).detach()

    (alone,) = run_ranks(output, 1, 1, 1)
    found = run_ranks(output, 2, tp, ep)

    if tp == 2:
        for result, gradient, _ in found:
            torch.testing.assert_close((result, gradient), alone[:2], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[0][2] + found[1][2], alone[2], rtol=1e-10, atol=1e-12)
    else:
        whole = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        torch.testing.assert_close(whole, alone, rtol=1e-10, atol=1e-12)


def test_chosen_experts_compute_what_they_compute_among_all():
    layer = ExpertFusedColumnParallelLinear(4, 8, 12, dtype=torch.float64)
    tokens = tokens_of(1, 3, 8)

    chosen = layer(tokens, torch.tensor([2, 0]))

    torch.testing.assert_close(chosen, layer(tokens)[[2, 0]])
    with pytest.raises(ValueError, match="input_ has 3 experts, but this rank has 4; pass as many, or 1"):
        layer(tokens_of(3, 3, 8))
    with pytest.raises(NotImplementedError, match="bias of mixture-of-experts layers is not supported"):
        ExpertFusedColumnParallelLinear(4, 8, 12, bias=True)


def test_experts_gate_as_their_configuration_says():
    options = {"hidden_act_scaling_factor": 1.7, "gate_clamp_upper_limit": 0.1, "glu_type": "swiglu"}
    made = []
    for build in (
        lambda: ExpertMLPsV2(config(hidden_act_bias=0.5, **options), dtype=torch.float64),
        lambda: ExpertMLPs(4, 2, 8, 12, "silu", True, None, hidden_act_bias=0.5, dtype=torch.float64, **options),
    ):
        torch.manual_seed(2)
        made.append(build())
    made[1].load_state_dict(made[0].state_dict())
    tokens, index = tokens_of(5, 8), torch.tensor([[3, 1]]).expand(5, 2)

    outputs = [it(tokens, torch.full((5, 4), 0.25, dtype=torch.float64), index, seq_len=5) for it in made]

    mlps = made[0].mlp_op
    expected = 0
    for expert in (3, 1):
        gate, up = (tokens @ mlps.gate_up_proj.weight[expert]).chunk(2, dim=-1)
        gate = gate.clamp(max=0.1)
        expected = expected + 0.25 * (gate * F.silu(1.7 * gate) * (up + 0.5)) @ mlps.down_proj.weight[expert]
    torch.testing.assert_close(outputs, [expected, expected])
    with pytest.raises(NotImplementedError, match="up_clamp_limits_with_hidden_act_bias"):
        ExpertMLPsV2(config(hidden_act_bias=1.0, up_clamp_upper_limit=7.0))


def test_configurations_take_names_and_defaults():
    blockwise = BlockwiseMatmulConfig.from_kwargs(block_sharding_strategy="PING_PONG", unknown=1)

    assert blockwise.block_sharding_strategy.name == "PING_PONG"
    assert blockwise.block_size == BlockwiseMatmulConfig.default().block_size == 512
    assert config(glu_type="swiglu").glu_type is GLUType.SWIGLU
    assert GLUType.validate(None) is GLUType.GLU
    assert RouterConfig.from_kwargs(router_dtype="bfloat16", router_act_fn="sigmoid", other=2) == RouterConfig(
        "sigmoid", torch.bfloat16
    )
    for refused in (
        lambda: GLUType.validate("reglu"),
        lambda: RouterConfig(dtype="f"),
    ):
        with pytest.raises(ValueError, match=r"unknown .*; use one of"):
            refused()
    assert GroupLimitedRouter(8, 2, 4, 4, 2, False, None, torch.float64).linear_router.weight.dtype == torch.float64
