"""Unmodified models of transformers on two and four ranks: the loss and gradients of one process, in float64."""

from itertools import product

import pytest
import torch
from hf_survey.architectures import surveyed, tiny_batch, tiny_config, tiny_model
from hf_survey.comparison import CONTEXT_LAYOUTS, EXPERT_LAYOUTS, LAYOUTS, one_process
from hf_survey.settings import changes_of
from hf_survey.survey import judge
from hf_survey.table import BEGIN, END, make_table, put_between_markers
from nxd_layers.hf.experts import compute_shared_experts_early
from nxd_layers.hf.supported_models import SHARED_EXPERTS_LAST
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FEW = ["llama", "gemma2", "qwen2_moe", "gpt_neox"]
NAMED = ["qwen2", "qwen3", "gemma", "gemma3_text", "mistral", "phi3", "granite", "olmo2", "starcoder2", "cohere"]
NAMED += ["smollm3", "glm4"]


EXPERTS = ["qwen3_moe", "deepseek_v3", "gpt_oss", "jamba"]
CONTEXTS = ["gemma2", "qwen3_next", "gpt_oss", "deepseek_v3", "mamba2"]
QUICK_CELLS = [("deepseek_v3", "EP 2"), ("gpt_oss", "EP 2 x TP 2")]
QUICK_CELLS += [("gpt_oss", "CP 2, ring"), ("qwen3_next", "CP 2 x TP 2"), ("gemma2", "CP 2 x PP 2")]
OF_OTHER_KINDS = ["bart", "bert", "t5", "whisper"]  # with a plan of ours
OTHERS_WITH_OUR_PLAN = ["roberta", "vit", "gpt2", "gpt_oss", "bloom", "opt", "falcon_h1", "mamba2"]


def verdicts(run_ranks, model_type):
    (expected,) = run_ranks(one_process, 1, model_type)
    return [judge(run_ranks, model_type, layout, expected, 120.0) for layout in LAYOUTS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMED)])
def test_architecture_in_parallel_equals_one_process(run_ranks, model_type):
    found = verdicts(run_ranks, model_type)

    assert [(verdict.outcome, verdict.reason) for verdict in found] == [("pass", "")] * len(LAYOUTS)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model_type", [*OF_OTHER_KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS_WITH_OUR_PLAN)]
)
def test_plan_of_ours_gives_the_numbers_of_one_process(run_ranks, model_type):
    (expected,) = run_ranks(one_process, 1, model_type)

    verdict = judge(run_ranks, model_type, LAYOUTS[0], expected, 120.0)

    assert (verdict.outcome, verdict.reason) == ("pass", "")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        pytest.param(*cell, marks=() if (cell[0], str(cell[1])) in QUICK_CELLS else pytest.mark.slow)
        for cell in [*product(EXPERTS, EXPERT_LAYOUTS), *product(CONTEXTS, CONTEXT_LAYOUTS)]
    ],
    ids=str,
)
def test_experts_and_sequences_over_ranks_give_the_numbers_of_one_process(run_ranks, model_type, layout):
    (expected,) = run_ranks(one_process, 1, model_type)

    verdict = judge(run_ranks, model_type, layout, expected, 300.0)

    assert (verdict.outcome, verdict.reason) == ("pass", "")


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", sorted(SHARED_EXPERTS_LAST))
def test_shared_experts_of_listed_types_are_computed_early_and_once(model_type):
    model = tiny_model(model_type)
    blocks = [it for it in model.modules() if hasattr(it, "shared_experts") and hasattr(it, "experts")]
    expected = model(**tiny_batch(model_type)).logits
    counts = [0] * len(blocks)
    for index, block in enumerate(blocks):

        def count(*_, index=index):
            counts[index] += 1

        next(block.shared_experts.children()).register_forward_hook(count)
        early = compute_shared_experts_early(block)
        block.experts.register_forward_pre_hook(lambda *_, early=early: early())

    found = model(**tiny_batch(model_type)).logits

    assert blocks
    assert counts == [1] * len(blocks)
    assert torch.equal(found, expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bamba", {"z_loss_coefficient": 0.5, "attn_layer_indices": [0, 1, 2, 3]}),
        ("cohere", {"use_qk_norm": True}),
        ("gemma3n_text", {"activation_sparsity_pattern": [0.5, 0.0, 0.95, 0.0]}),
        ("glm4_moe", {"use_qk_norm": True}),
        ("glm4_moe_lite", {"q_lora_rank": None}),
        ("llama", {"hidden_act": "xielu"}),
        ("longcat_flash", {"zero_expert_num": 1}),
        ("phi", {"qk_layernorm": True}),
        ("qwen3_moe", {"hidden_act": "xielu"}),
    ],
    ids=str,
)
def test_setting_that_changes_the_computation_gives_the_numbers_of_one_process(run_ranks, model_type, changes):
    expected = one_process(model_type, **changes)

    verdict = judge(run_ranks, model_type, LAYOUTS[0], expected, 120.0, changes)

    assert (verdict.outcome, verdict.reason) == ("pass", "")


def test_router_loss_of_the_model_in_a_pipeline_gives_the_numbers_of_one_process(run_ranks):
    changes = {"output_router_logits": True}
    expected = one_process("qwen3_moe", **changes)

    verdict = judge(run_ranks, "qwen3_moe", LAYOUTS[1], expected, 120.0, changes)

    assert (verdict.outcome, verdict.reason) == ("pass", "")


def test_keys_and_values_of_another_stage_are_refused(run_ranks):
    changes = {"num_kv_shared_layers": 2}
    expected = one_process("gemma4_unified_text", **changes)

    verdict = judge(run_ranks, "gemma4_unified_text", LAYOUTS[1], expected, 120.0, changes)

    assert verdict.outcome == "refused"
    assert "num_kv_shared_layers" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("model_type", surveyed())
def test_every_setting_of_a_type_gives_the_numbers_of_one_process_or_is_refused(run_ranks, model_type):
    plain, verdicts = one_process(model_type).loss, []
    for changes in changes_of(model_type):
        try:
            expected = one_process(model_type, **changes)
        except Exception:  # no such model in one process
            continue
        if expected.loss.isfinite() and not torch.equal(expected.loss, plain):
            found = [judge(run_ranks, model_type, layout, expected, 120.0, changes) for layout in LAYOUTS[:2]]
            verdicts += [(verdict, changes) for verdict in found]

    assert [it for it in verdicts if it[0].outcome not in ("pass", "refused")] == []


def test_small_models_have_layers_of_every_kind():
    def kinds(config):
        return set(getattr(config, "layer_types", None) or [])

    missing = {name: kinds(CONFIG_MAPPING[name]()) - kinds(tiny_config(name)) for name in surveyed()}

    assert {name: it for name, it in missing.items() if it} == {}


def test_survey_tells_refusals_from_differences_and_failures(run_ranks, monkeypatch, tmp_path):
    assert {*FEW, *NAMED} <= set(surveyed())
    (expected,) = run_ranks(one_process, 1, "doge")
    refused = judge(run_ranks, "doge", LAYOUTS[0], expected, 120.0)
    differs = judge(run_ranks, "llama", LAYOUTS[1], expected, 120.0)  # compared with another model
    fails = judge(run_ranks, "no such type", LAYOUTS[0], expected, 120.0)

    assert (refused.outcome, differs.outcome, fails.outcome) == ("refused", "differs", "fails")
    assert differs.reason.startswith("loss ")

    document = tmp_path / "support.md"
    begin, end = BEGIN.format(name="layers"), END.format(name="layers")
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    table = make_table([refused], LAYOUTS[:1], "5.0")
    assert "| doge | refused |" in table
    assert f"- doge at TP 2: {refused.reason}" in table
    put_between_markers(document, "layers", table)
    assert document.read_text() == f"before\n{begin}\n\n{table}\n\n{end}\nafter\n"
