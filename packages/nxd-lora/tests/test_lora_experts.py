"""Adapters of fused expert weights at every layout, against one process in float64."""

import pytest
import torch
from nxd_layers.experts import ExpertMLPs, MoE, RouterTopK
from nxd_lora import LoraConfig, LoraModel, gather_adapter
from nxd_state import all_reduce, destroy_model_parallel, get_group, get_shard_spec, initialize_model_parallel
from torch import nn

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 4, 2, 8, 12, 10
EXACT = {"rtol": 1e-10, "atol": 1e-12}
TARGETS = ["gate_up_proj.weight", "mlp_op.down_proj.weight"]
LAYOUTS = {  # ranks, tp, ep, etp
    "one rank": (1, 1, 1, 1),
    "TP 2": (2, 2, 1, 2),
    "EP 2": (2, 1, 2, 1),
    "EP 2 over TP 2": (2, 2, 2, 1),
    "whole experts on TP 2": (2, 2, 1, 1),
    "EP 2 x TP 2": (4, 2, 2, 2),
}


def make_model(**options):
    torch.manual_seed(3)
    router = RouterTopK(EXPERTS, TOP_K, HIDDEN, dtype=torch.float64)
    layer = MoE(router, ExpertMLPs(EXPERTS, TOP_K, HIDDEN, INNER, dtype=torch.float64))
    return LoraModel(layer, LoraConfig(lora_rank=3, lora_alpha=6, target_parameters=TARGETS, **options))


def loss_of(model, tokens):
    return (model(tokens)[0] * torch.arange(1.0, HIDDEN + 1)).square().sum()


def inputs_of(replicas, case):
    generator = torch.Generator().manual_seed(5)
    made = torch.randn(replicas, TOKENS, 1, HIDDEN, dtype=torch.float64, generator=generator)
    return made[:, :1].expand(-1, TOKENS, -1, -1).contiguous() if case == "experts without tokens" else made


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", ["any", "experts without tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors_of_experts_train_as_in_one_process(run_ranks, fill_adapter, layout, case):
    ranks, tp, ep, etp = LAYOUTS[layout]

    def job():
        initialize_model_parallel(1)
        alone = make_model()
        filled = fill_adapter(alone)
        tokens = inputs_of(ranks // tp, case)
        losses = [loss_of(alone, it) for it in tokens]
        sum(losses).backward()
        destroy_model_parallel()
        initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=etp)
        model, replicas = make_model(), get_group("dp")
        fill_adapter(model)

        loss = loss_of(model, tokens[replicas.rank])
        loss.backward()

        torch.testing.assert_close(loss, losses[replicas.rank], **EXACT)
        wanted = {name: it.grad for name, it in alone.factors().items()}
        assert filled.keys() == wanted.keys()
        for name, parameter in model.factors().items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            is_expert = getattr(parameter, "expert_model_parallel", False)
            gradient = all_reduce(gradient, get_group("dp_exp") if is_expert else replicas)
            spec = get_shard_spec(parameter)
            boxes = [(slice(None), slice(None))] if spec is None else []
            boxes += [(it.local.slices, it.logical.slices) for it in (spec.pieces if spec else ())]
            for local, logical in boxes:
                torch.testing.assert_close(gradient[local], wanted[name][logical], **EXACT)

    run_ranks(job, ranks)


@pytest.mark.parametrize("layout", ["EP 2", "TP 2"])
def test_factors_are_drawn_gathered_and_merged_as_in_one_process(run_ranks, fill_adapter, layout):
    ranks, tp, ep, etp = LAYOUTS[layout]

    def job():
        initialize_model_parallel(1)
        drawn = gather_adapter(make_model())
        destroy_model_parallel()
        initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=etp)
        model = make_model()
        found = gather_adapter(model)
        assert found.keys() == drawn.keys()
        for name, whole in drawn.items():
            assert torch.equal(found[name], whole)
            assert bool(whole.any()) == ("lora_A" in name)

        fill_adapter(model)
        tokens = inputs_of(get_group("dp").size, "any")[get_group("dp").rank]
        with_adapter = model(tokens)[0]
        model.merge()
        torch.testing.assert_close(model(tokens)[0], with_adapter, **EXACT)
        model.unmerge()
        assert torch.equal(model(tokens)[0], with_adapter)
        plain = model.unload()
        assert not torch.allclose(plain(tokens)[0], with_adapter)
        assert not [name for name, _ in plain.named_parameters() if "lora" in name]

    run_ranks(job, ranks)


def test_factors_start_as_those_of_a_linear_layer():
    model = make_model()
    factor = model.factors()["expert_mlps.mlp_op.down_proj.lora_A_weight"]

    assert factor.shape == (EXPERTS, 3, INNER)
    assert factor.abs().max() <= INNER**-0.5
    assert factor.abs().max() > 0.8 * INNER**-0.5


def test_weight_reads_as_itself_after_a_forward_that_raises():
    model = make_model()
    with pytest.raises(RuntimeError):
        model(torch.ones(TOKENS, 1, HIDDEN + 1, dtype=torch.float64))

    assert isinstance(model.module.expert_mlps.mlp_op.down_proj.weight, nn.Parameter)
    assert isinstance(model.module.expert_mlps.mlp_op.gate_up_proj.weight, nn.Parameter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_parameters": ["experts.up"]}, r"'experts.up' names no expert weights.*gate_up_proj.weight"),
        ({"target_parameters": ["linear_router.weight"]}, "'linear_router.weight' names no expert weights"),
        ({"target_parameters": TARGETS, "modules_to_save": ["mlp_op"]}, "both name expert_mlps.mlp_op.gate_up_proj"),
        (
            {"target_modules": ["gate_up_proj"]},
            r"'gate_up_proj' names fused expert weights.*target_parameters=\['gate_up_proj",
        ),
        ({"target_parameters": "experts.up"}, "target_parameters='experts.up' must be a list of names"),
        ({"target_parameters": TARGETS, "lora_dropout": 0.1}, "target_parameters does not support lora_dropout=0.1"),
        ({"target_parameters": TARGETS, "use_dora": True}, "target_parameters does not support use_dora=True"),
    ],
)
def test_what_cannot_be_adapted_is_refused(options, message):
    layer = MoE(RouterTopK(EXPERTS, TOP_K, HIDDEN), ExpertMLPs(EXPERTS, TOP_K, HIDDEN, INNER))

    with pytest.raises(ValueError, match=message):
        LoraModel(layer, LoraConfig(**options))
