"""The recipe that a plan writes trains the model that was planned."""

import json
from pathlib import Path

import pytest
import torch
from nxd_engine.hugging_face import full_config
from nxd_plan import FixedDegrees, TrainingJob, find_device, make_plan, planned_model, recipe, save_recipe
from nxd_trainer.from_recipe import recipe_model
from nxd_trainer.recipe import load_recipe

pytest.importorskip("transformers")

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
    "mistral": {"head_dim": 32, "sliding_window": 16},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "gpt_oss": {**EXPERTS, "head_dim": 32},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("model_type", "suffix"), [*((name, "toml") for name in CONFIGS), ("qwen3", "json")])
def test_recipe_of_a_plan_makes_the_model_that_was_planned(tmp_path, model_type, suffix):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **CONFIGS[model_type]}))
    job = TrainingJob(planned_model(tmp_path), find_device("cpu"), 2, 32, 8, torch.float32)
    [planned] = make_plan(job, FixedDegrees(1, 2, False, 1, 2, "full"), top=1).best

    of_the_plan = load_recipe(save_recipe(recipe(job, planned.layout), tmp_path / f"it.{suffix}"))

    made = recipe_model(of_the_plan).description.config
    asked_for = full_config(json.loads((tmp_path / "config.json").read_text()))
    ignored = ("eos_token_id", "architectures", "dtype")  # the first is the tokenizer's
    assert {name: it for name, it in made.items() if name not in ignored} == {
        name: it for name, it in asked_for.items() if name not in ignored
    }
    assert of_the_plan.parallel.pipeline_parallel_size == 2
    assert (of_the_plan.parallel.zero_stage, of_the_plan.parallel.activation_checkpointing) == (1, "full")


def test_recipe_of_a_plan_lists_the_keys_to_set_as_comments(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    job = TrainingJob(planned_model(tmp_path), find_device("cpu"), 2, 32, 8, torch.float32)
    [planned] = make_plan(job, FixedDegrees(1, 2, False, 1, 2, "full"), top=1).best
    file = save_recipe(recipe(job, planned.layout), tmp_path / "it.toml")
    as_written = load_recipe(file)

    instruction, *lines = file.read_text().splitlines()
    file.write_text("\n".join(line.removeprefix("# ") for line in lines))

    assert instruction.startswith("# Before the run")
    assert "[model]  # our own Llama with these sizes, because neither path nor type is set" in lines
    completed = load_recipe(file)
    assert as_written.output != completed.output == Path("/shared/runs/first")
    assert as_written.data.path is None
    assert completed.data.path == Path("/shared/texts")
    assert (completed.train, completed.optimizer) == (as_written.train, as_written.optimizer)
    assert completed.checkpoint == as_written.checkpoint
