"""Mixture-of-experts layers as scripts for NeuronX Distributed make and call them."""

import pytest
import torch
from neuronx_distributed.modules.moe import ACT2FN, load_balancing_loss_func
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.routing import RouterSinkhorn, RouterTopK
from nxd_state import initialize_model_parallel


def make_layer(sequence_parallel_enabled=False, **further):
    """As the Mixtral of the training examples has it."""
    router = RouterTopK(
        num_experts=4,
        top_k=2,
        hidden_size=8,
        sequence_parallel_enabled=sequence_parallel_enabled,
        sequence_dimension=0,
    )
    expert_mlps = ExpertMLPs(
        num_experts=4,
        top_k=2,
        hidden_size=8,
        intermediate_size=12,
        hidden_act="silu",
        glu_mlp=True,
        capacity_factor=None,
        normalize_top_k_affinities=True,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=0.1),
        output_layer_init_method=lambda weight: torch.nn.init.normal_(weight, std=0.1),
        block_size=512,
        use_torch_block_wise=True,
        **further,
    )
    return MoE(
        router=router,
        expert_mlps=expert_mlps,
        return_router_logits=True,
        return_expert_index=False,
        sequence_parallel_enabled=sequence_parallel_enabled,
        sequence_dimension=0,
    )


def outputs(tp):
    initialize_model_parallel(tp)
    torch.manual_seed(0)
    layer = make_layer()
    output, logits = layer(torch.arange(6 * 2 * 8.0).view(6, 2, 8).sin())
    names = sorted(name for name, _ in layer.named_parameters())
    return output.detach(), load_balancing_loss_func(logits, num_experts=4, top_k=2).item(), names


def test_layer_of_a_script_computes_the_same_on_two_ranks(run_ranks):
    (alone,) = run_ranks(outputs, 1, 1)

    for output, loss, names in run_ranks(outputs, 2, 2):
        torch.testing.assert_close(output, alone[0])
        assert loss == pytest.approx(alone[1])
        assert names == [
            "expert_mlps.mlp_op.down_proj.weight",
            "expert_mlps.mlp_op.gate_up_proj.weight",
            "router.linear_router.weight",
        ]


def test_arguments_by_position_are_in_that_librarys_order():
    router = RouterTopK(4, 1, 8, False, None, torch.float64)
    mlps = ExpertMLPs(4, 1, 8, 12, "gelu", False, 2.0, False, None, True, dtype=torch.float64)
    layer = MoE(router, mlps, None, None, False, None, False, True)

    output, index = layer(torch.ones(3, 1, 8, dtype=torch.float64))

    assert output.dtype == torch.float64
    assert index.shape == (3, 1)
    assert mlps.capacity_factor == 2.0
    assert "gelu" in ACT2FN
    assert RouterSinkhorn(4, 1, 8, "sigmoid", False, None, torch.float32, None, 5).sinkhorn_iterations == 5


@pytest.mark.parametrize(
    "further",
    [{"bias": True}, {"early_expert_affinity_modulation": True}, {"expert_distribution": [[0, 1], [2, 3]]}],
    ids=lambda it: next(iter(it)),
)
def test_arguments_whose_work_is_not_done_are_refused(further):
    with pytest.raises(
        NotImplementedError, match=f"{next(iter(further))} of mixture-of-experts layers is not supported"
    ):
        make_layer(**further)
