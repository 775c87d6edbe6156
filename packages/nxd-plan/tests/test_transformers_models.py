"""Plans of tiny models of transformers: their layers by kind, what cannot be split, and recipes that train them."""

import json
from dataclasses import replace

import pytest
import torch
from nxd_engine.hugging_face import full_config
from nxd_plan import FixedDegrees, TrainingJob, config_call, find_device, make_plan, planned_model, recipe

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "phi3": {},
    "glm4": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 16},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "gpt_oss": {**EXPERTS, "head_dim": 32},
    "deepseek_v3": {
        **EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}


@pytest.fixture
def model_of(tmp_path):
    def model_of(model_type, **further):
        content = {"model_type": model_type, **SIZES, **CONFIGS.get(model_type, {}), **further}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return planned_model(tmp_path)

    return model_of


def job(model, num_devices=2, **further):
    further = {"sequence_length": 32, "global_batch_size": 8, "dtype": torch.float32, **further}
    return TrainingJob(model, find_device("cpu"), num_devices, **further)


def only(plan):
    (planned,) = plan.best
    return planned


def elements(model):
    return sum(parameter.numel() for parameter in model.outline().parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "phi3", "glm4", "mistral", "mixtral", "qwen3_moe"])
def test_models_are_planned_at_every_degree(model_of, model_type):
    plan = make_plan(job(model_of(model_type)), FixedDegrees(zero_stage=0, microbatch_size=1), top=100)
    found = {(it.layout.degrees.tp, it.layout.degrees.sequence_parallel, it.layout.degrees.pp) for it in plan.best}
    assert found == {(1, False, 1), (1, False, 2), (2, False, 1), (2, True, 1)}
    assert not plan.rejected


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_all_parameters_are_held_by_one_rank_and_shared_out_to_stages(model_of, model_type):
    model = model_of(model_type)
    whole, cut = (
        only(make_plan(job(model, ranks), FixedDegrees(1, ranks, False, 0, 1, "none"), top=1)) for ranks in (1, 2)
    )
    assert whole.memory.parameters == 4 * elements(model)
    assert sum(memory.parameters for memory in cut.memories) == whole.memory.parameters


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gemma2", {"head_dim": 32, "attn_logit_softcapping": 50.0}),  # computes attention with a mask
        ("deepseek_v32", {**CONFIGS["deepseek_v3"], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}),
        ("gpt2", {"pad_token_id": 0}),  # looks for padding in its tokens
        ("gemma4_text", {"head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512}),
    ],
)
def test_model_is_planned_without_values_of_its_tokens(tmp_path, model_type, config):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **config}))
    model = planned_model(tmp_path)

    plan = make_plan(job(model, 1), FixedDegrees(1, 1, False, 0, 1, "none"), top=1)

    assert only(plan).memory.parameters == 4 * elements(model)


def test_model_without_a_gradient_of_its_embedding_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES, "head_dim": 32}))
    layer = "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer.forward"
    monkeypatch.setattr(layer, lambda self, hidden, **_: hidden.detach().requires_grad_())

    with pytest.raises(ValueError, match="backward of the embedding begins"):
        make_plan(job(planned_model(tmp_path), 1), FixedDegrees(1, 1, False, 0, 1, "none"), top=1)


def test_a_tied_embedding_is_held_by_both_ends_of_a_pipeline_and_its_gradient_is_sent(model_of):
    model = model_of("qwen3", tie_word_embeddings=True)
    cut = only(make_plan(job(model), FixedDegrees(1, 2, False, 0, 1, "none"), top=1))
    table, hidden = 4 * 512 * 64, 4 * 32 * 64
    assert sum(memory.parameters for memory in cut.memories) == 4 * elements(model) + table
    assert cut.communication.pp == 8 * hidden + table


def test_layers_are_alike_if_their_parameters_are(model_of):
    assert model_of("gemma3_text").layer_kinds == (0, 0, 0, 0)
    assert model_of("qwen3_moe").layer_kinds == (0, 1, 0, 0)
    assert model_of("deepseek_v3").layer_kinds == (0, 1, 1, 1)


def test_layers_of_two_kinds_each_count_as_what_they_are(model_of):
    degrees = FixedDegrees(1, 1, False, 0, 1, "none")
    kept, states = [], []
    for dense in ([], [1], [1, 2], [0, 1, 2, 3]):
        memory = only(make_plan(job(model_of("qwen3_moe", mlp_only_layers=dense), 1), degrees, top=1)).memory
        kept.append(memory.activations)
        states.append(memory.parameters)
    assert kept[0] - kept[1] == kept[1] - kept[2] != 0
    assert states[0] - states[1] == states[1] - states[2] != 0


def test_only_the_experts_that_a_token_is_sent_to_compute(model_of):
    degrees = FixedDegrees(1, 1, False, 0, 1, "none")
    few, many, other = (
        only(make_plan(job(model_of("mixtral", **experts), 1), degrees, top=1)).time
        for experts in (
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            {"num_local_experts": 8, "num_experts_per_tok": 2},
            {"num_local_experts": 4, "num_experts_per_tok": 4},
        )
    )
    flops = [time.mfu * time.seconds for time in (few, many, other)]
    router, expert = 2 * 4 * 64, 2 * 3 * 64 * 96  # of a token in a layer, for four experts more, and one active more
    per_token = find_device("cpu").flops_of("float32") / (3 * 4 * 32 * 8)
    assert (flops[1] - flops[0]) * per_token == pytest.approx(router)
    assert (flops[2] - flops[0]) * per_token == pytest.approx(2 * expert)


@pytest.mark.parametrize(
    ("model_type", "rejected", "reason"),
    [
        ("deepseek_v3", "TP 2 + SP", "sequence_parallel=True is not supported for"),
    ],
)
def test_what_an_architecture_refuses_is_a_rejected_layout_with_its_reason(model_of, model_type, rejected, reason):
    plan = make_plan(job(model_of(model_type)), FixedDegrees(zero_stage=0, microbatch_size=1))
    assert plan.best
    assert [it.what for it in plan.rejected] == [rejected]
    assert reason in plan.rejected[0].reason


def test_degree_at_which_a_model_does_not_run_is_rejected_and_the_others_are_planned(model_of):
    plan = make_plan(
        job(model_of("bloom", num_attention_heads=2), 4), FixedDegrees(pipeline_parallel_size=1, microbatch_size=1)
    )
    assert {it.layout.degrees.tp for it in plan.best} <= {1, 2}
    assert any(it.what == "TP 4" and "does not run on meta tensors" in it.reason for it in plan.rejected)


def test_a_model_that_looks_at_values_is_refused_with_a_reason(model_of, monkeypatch):
    layer = transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer
    monkeypatch.setattr(layer, "forward", lambda self, hidden, *args, **kwargs: hidden * hidden.sum().item())
    with pytest.raises(ValueError, match="Qwen3ForCausalLM does not run on meta tensors, which planning needs"):
        make_plan(job(model_of("qwen3"), 1))


def test_attention_of_heads_with_smaller_values_is_one_operation_that_keeps_no_scores(model_of):
    model = model_of("deepseek_v3", max_position_embeddings=4096)
    short, long = (
        only(make_plan(job(model, 1, sequence_length=it), FixedDegrees(1, 1, False, 0, 1, "none"), top=1)).memory
        for it in (512, 1024)
    )
    assert long.activations <= 2 * short.activations


def test_the_recipe_of_a_folder_with_weights_begins_with_them(tmp_path):
    config = transformers.Qwen3Config(**SIZES, head_dim=32)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    model = planned_model(tmp_path / "model", {"max_position_embeddings": 64})
    planned = only(make_plan(job(model, 1), FixedDegrees(1, 1, False, 0, 1, "none"), top=1))

    section = recipe(job(model, 1), planned.layout)["model"]
    assert section == {"path": str(tmp_path / "model"), "config": {"max_position_embeddings": 64}}


def test_a_null_that_a_recipe_cannot_say_is_named_and_the_lines_of_python_say_it(model_of):
    model = model_of("mistral", sliding_window=None)
    planned = only(make_plan(job(model, 1), FixedDegrees(1, 1, False, 0, 1, "none"), top=1))
    with pytest.raises(
        ValueError, match=r"model.config.sliding_window: null in the config.json, which a recipe cannot"
    ):
        recipe(job(model, 1), planned.layout)
    assert "sliding_window=None" in config_call(job(model, 1), planned.layout)


@pytest.fixture
def multimodal_folder(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config={**SIZES, **CONFIGS["gemma3_text"]}, vision_config=vision)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_towers_take_the_memory_of_their_use(multimodal_folder, zero_stage):
    def memory(towers):
        model = planned_model(multimodal_folder, towers=towers)
        return only(make_plan(job(model), FixedDegrees(1, 1, False, zero_stage, 1, "none"), top=1)).memory

    frozen, trained, left_out = map(memory, ("frozen", "train", "left_out"))
    with_towers, without = (elements(planned_model(multimodal_folder, towers=it)) for it in ("frozen", "left_out"))
    per_rank = 2 if zero_stage else 1

    assert trained.parameters == frozen.parameters
    assert frozen.parameters - left_out.parameters == 4 * (with_towers - without) // (2 if zero_stage == 3 else 1)
    assert frozen.optimizer_state == left_out.optimizer_state
    assert trained.optimizer_state - frozen.optimizer_state == 2 * 4 * (with_towers - without) // per_rank
    assert trained.peak > frozen.peak > left_out.peak


def test_a_model_of_text_and_more_is_planned_and_has_a_recipe_by_its_folder_only(multimodal_folder):
    model = planned_model(multimodal_folder)
    planned = only(make_plan(job(model, 1), FixedDegrees(1, 1, False, 0, 1, "none"), top=1))
    with pytest.raises(
        ValueError, match="model_type=gemma3 is a multimodal model, which a recipe can name only by its"
    ):
        recipe(job(model, 1), planned.layout)


def test_the_lines_of_a_plan_make_the_config_that_was_planned(model_of):
    model = model_of("gemma3_text")
    planned = only(make_plan(job(model), FixedDegrees(1, 2, False, 0, 2, "full"), top=1))
    lines = config_call(job(model), planned.layout)
    names = {"torch": torch, "Gemma3TextConfig": transformers.Gemma3TextConfig}
    exec(lines.partition("\nwith ")[0], names)
    asked_for = {**SIZES, **CONFIGS["gemma3_text"], "use_cache": False}
    assert {name: getattr(names["config"], name) for name in asked_for} == asked_for
    assert '"param_init_fn": outline._init_weights' in lines


def test_infinite_values_of_a_config_are_read_as_transformers_writes_them(tmp_path):
    config = transformers.FalconH1Config()
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["time_step_limit"] == [0.0, {"__float__": "Infinity"}]

    completed = full_config(content)

    assert completed["time_step_limit"] == content["time_step_limit"]
    assert completed == full_config(completed)


ALONE = FixedDegrees(1, 1, False, 0, 1, "none", expert_parallel_size=1)


def test_experts_are_shared_out_and_what_tokens_send_is_counted(model_of):
    model = model_of("mixtral")
    whole = only(make_plan(job(model), ALONE, top=1))
    shared = only(make_plan(job(model), replace(ALONE, expert_parallel_size=2), top=1))

    layers, experts, hidden, inner, top_k, tokens = 4, 4, 64, 96, 2, 32
    assert whole.memory.parameters - shared.memory.parameters == 4 * layers * (experts // 2) * 3 * hidden * inner
    assert whole.communication.ep == 0
    sent = round(tokens * 5 / 6)  # of six pairs of experts one is on the sender's rank alone
    # Tokens there and back, and their gradients; weights and their gradients; the experts chosen.
    row = 4 * hidden * 4 + 2 * top_k * 4 + top_k * 8
    assert shared.communication.ep == 4 * layers * sent * row  # of four microbatches
    assert shared.communication.dp < whole.communication.dp


def test_experts_on_trainium_compute_for_the_gathered_tokens_of_all_ranks(model_of):
    on_trainium = replace(job(model_of("mixtral")), device=find_device("trn2"))
    whole = only(make_plan(on_trainium, ALONE, top=1))
    shared = only(make_plan(on_trainium, replace(ALONE, expert_parallel_size=2), top=1))

    layers, hidden, inner, top_k, tokens = 4, 64, 96, 2, 32
    # Tokens there and back, and their gradients; weights and their gradients; the experts chosen.
    row = 4 * hidden * 4 + 2 * top_k * 4 + top_k * 8
    assert shared.communication.ep == 4 * layers * tokens * row  # of four microbatches; all tokens to the other rank
    assert whole.communication.ep == 0
    assert whole.memory.parameters - shared.memory.parameters == 4 * layers * 2 * 3 * hidden * inner
    # All four experts for the tokens of one rank, or two of them for those of both, are as much arithmetic.
    assert whole.time.pipeline <= shared.time.pipeline
    assert shared.memory.activations >= whole.memory.activations > layers * 4 * 3 * tokens * inner * 4


def test_models_with_experts_are_planned_with_them_shared_out(model_of):
    device = replace(find_device("cpu"), memory_bytes=int(4.5 * 2**20))
    crowded = replace(job(model_of("mixtral"), 4), device=device)
    plan = make_plan(crowded, FixedDegrees(tensor_parallel_size=1, pipeline_parallel_size=1, zero_stage=0))

    assert {it.layout.degrees.ep for it in plan.best} == {4}
    assert "expert_parallel_size=4" in config_call(crowded, plan.best[0].layout)
    assert recipe(crowded, plan.best[0].layout)["parallel"]["expert_parallel_size"] == 4


@pytest.mark.parametrize(
    ("model_type", "degrees", "reason"),
    [
        ("mixtral", {"expert_parallel_size": 3}, "expert_parallel_size=3 does not divide the 4 experts of a layer"),
        ("mixtral", {"expert_parallel_size": 4}, "ep=4 x etp=1 = 4 does not divide dp x cp x tp = 2"),
        ("qwen3", {"expert_parallel_size": 2}, "expert_parallel_size=2 needs a model with experts"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused_by_name(model_of, model_type, degrees, reason):
    plan = make_plan(job(model_of(model_type)), FixedDegrees(1, 1, **degrees))

    assert not plan.best
    assert [it.reason for it in plan.rejected if reason in it.reason]


def test_experts_split_over_some_of_the_ranks_that_split_layers_are_refused():
    with pytest.raises(ValueError, match="expert_tensor_parallel_size=2 must be 1 or tensor_parallel_size=4"):
        FixedDegrees(4, expert_tensor_parallel_size=2)
