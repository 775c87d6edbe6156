"""`nxd plan` of a recipe."""

import json
import tomllib
from pathlib import Path

import pytest
from nxd_cli import main
from nxd_plan import OwnLlama
from nxd_trainer.planned_recipe import recipe_to_plan

RECIPE = """
[model]
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2

[data]
sequence_length = 128

[train]
global_batch_size = 32
"""
DEVICES = ["--device", "h100", "--devices", "4"]


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch) -> Path:
    """A small recipe, in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = Path("recipe.toml")
    file.write_text(RECIPE)
    return file


def planned(capsys, *arguments: str) -> list[dict]:
    assert main(["plan", "recipe.toml", *DEVICES, "--json", *arguments]) == 0
    return [found["layout"] for found in json.loads(capsys.readouterr().out)["best"]]


def test_sizes_batch_and_vocabulary_are_the_recipes_and_unset_degrees_are_tried(capsys, recipe):
    found = recipe_to_plan(recipe)

    assert (found.model.config.hidden_size, found.model.config.vocab_size) == (64, 320)  # a token per byte, rounded up
    assert (found.sequence_length, found.global_batch_size, str(found.dtype)) == (128, 32, "torch.float32")
    assert {layout["tensor_parallel_size"] for layout in planned(capsys, "--top", "100")} == {1, 2, 4}


def test_degrees_that_the_recipe_sets_are_fixed_and_flags_replace_them(capsys, recipe):
    recipe.write_text(
        RECIPE + "gradient_accumulation_steps = 8\n[parallel]\ntensor_parallel_size = 2\nzero_stage = 0\n"
    )
    layouts = planned(capsys, "--top", "100")

    assert {(it["tensor_parallel_size"], it["zero_stage"], it["num_microbatches"]) for it in layouts} == {(2, 0, 8)}
    assert {it["microbatch_size"] for it in layouts} == {2, 4}  # at DP 2, and at PP 2 x DP 1
    assert {it["tensor_parallel_size"] for it in planned(capsys, "--tensor-parallel-size", "1")} == {1}


def test_the_command_to_train_has_the_keys_that_differ(capsys, recipe):
    recipe.write_text(RECIPE + "[parallel]\ntensor_parallel_size = 2\npipeline_parallel_size = 2\nzero_stage = 0\n")

    assert main(["plan", "recipe.toml", *DEVICES, "--microbatch-size", "4", "--sequence-length", "64"]) == 0

    (line,) = [line for line in capsys.readouterr().out.splitlines() if "nxd train" in line]
    assert line.startswith("on 4 ranks: nxd train recipe.toml ")
    assert {"data.sequence_length=64", "train.gradient_accumulation_steps=8"} <= set(line.split())
    assert not [key for key in line.split() if key.startswith(("parallel.tensor", "parallel.pipeline", "model."))]


def test_keys_after_the_recipe_count_as_if_it_had_them(capsys):
    assert main(["plan", "recipe.toml", *DEVICES, "train.dtype=bfloat16", "--model.num_hidden_layers", "2"]) == 0

    printed = capsys.readouterr().out
    assert printed.startswith("planned: bfloat16 weights, 32 sequences of 128 tokens in a step\n")
    assert "nxd train recipe.toml train.dtype=bfloat16 model.num_hidden_layers=2 parallel.zero_stage=1" in printed


def test_the_recipe_of_the_fastest_layout_is_written_with_what_the_first_one_sets(capsys, recipe):
    recipe.write_text(f'output = "run"\n{RECIPE}\n[optimizer]\nlr = 0.01\n')
    assert main(["plan", "recipe.toml", *DEVICES, "--recipe", "new.toml", "train.steps=7"]) == 0

    written = tomllib.loads(Path("new.toml").read_text())
    assert written["output"] == "run"
    assert written["optimizer"] == {"lr": 0.01}
    assert written["train"]["steps"] == 7
    assert written["model"]["hidden_size"] == 64
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "nxd train" in line]
    assert line.startswith("on 4 ranks: nxd train recipe.toml train.steps=7 parallel.")
    assert main(["plan", "new.toml", *DEVICES]) == 0
    assert "on 4 ranks: nxd train new.toml\n" in capsys.readouterr().out  # nothing is left to change


def test_a_model_that_a_new_recipe_could_not_name_is_planned_as_its_recipe_names_it(capsys, recipe, monkeypatch):
    def refuse(model):
        raise ValueError("a recipe cannot name this model")

    monkeypatch.setattr(OwnLlama, "recipe_section", refuse)

    assert main(["plan", "recipe.toml", *DEVICES]) == 0
    assert "nxd train recipe.toml parallel." in capsys.readouterr().out


def test_keys_without_a_recipe_are_a_mistake(capsys):
    assert main(["plan", *DEVICES, "train.steps=3"]) == 2
    assert "train.steps is a recipe's key, but no recipe is given" in capsys.readouterr().err

    assert main(["plan", *DEVICES, "--verbose"]) == 2
    assert "unknown argument verbose; nxd plan --help" in capsys.readouterr().err


def test_what_the_plan_does_not_count_is_named(capsys, recipe):
    recipe.write_text(
        RECIPE + "ema_decay = 0.9\n[lora]\nrank = 4\n[parallel]\nactivation_checkpointing = 'selective'\n"
    )

    assert main(["plan", "recipe.toml", *DEVICES]) == 0

    said = "not counted: parallel.activation_checkpointing=selective, lora.rank=4, train.ema_decay=0.9\n"
    printed = capsys.readouterr().out
    assert printed.endswith(said)
    assert "parallel.activation_checkpointing=none" not in printed  # the recipe's own stays


def test_a_flag_for_checkpointing_takes_the_place_of_a_kind_that_is_not_planned(capsys, recipe):
    recipe.write_text(RECIPE + "[parallel]\nactivation_checkpointing = 'selective'\n")

    assert main(["plan", "recipe.toml", *DEVICES, "--checkpointing", "full"]) == 0

    printed = capsys.readouterr().out
    assert "parallel.activation_checkpointing=full" in printed
    assert "not counted" not in printed


def test_a_degree_that_returns_to_its_default_is_among_the_changes(capsys, recipe):
    experts = "type = 'qwen3_moe'\nconfig = { num_experts = 4, num_experts_per_tok = 2, moe_intermediate_size = 32 }\n"
    sizes = RECIPE.replace("[model]\n", f"[model]\n{experts}")
    degrees = "tensor_parallel_size = 2\nexpert_parallel_size = 2\nexpert_tensor_parallel_size = 1\n"
    recipe.write_text(f"{sizes}[parallel]\n{degrees}")
    flags = ["--expert-tensor-parallel-size", "2", "--expert-parallel-size", "1"]

    assert main(["plan", "recipe.toml", *DEVICES, *flags]) == 0

    assert "parallel.expert_tensor_parallel_size=2" in capsys.readouterr().out


def test_a_key_may_follow_a_switch_and_a_microbatch_size_replaces_the_recipes_number(capsys, recipe):
    recipe.write_text(RECIPE + "gradient_accumulation_steps = 4\n")

    layouts = planned(capsys, "--microbatch-size", "2", "--rejected", "train.global_batch_size=16")

    assert {it["microbatch_size"] for it in layouts} == {2}
    assert {it["num_microbatches"] for it in layouts} >= {2, 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden-size", "32"], "--hidden-size cannot change the model of recipe.toml; use the recipe's key"),
        (["--recipe", "new.txt"], "new.txt must end in .toml or .json"),
        (["train.stepz=3"], "did you mean train.steps"),
        (["--microbatch-size", "3", "--num-microbatches", "8"], "8 microbatches of 3 sequences are not the"),
        (["--num-microbatches", "3"], "num_microbatches=3 does not divide the"),
        (["--devices", "0"], "num_devices=0 must be 1 or more"),
    ],
)
def test_what_cannot_be_planned_is_a_mistake(capsys, arguments, message):
    assert main(["plan", "recipe.toml", *DEVICES, *arguments]) == 2

    assert message in capsys.readouterr().err


def test_mistakes_of_the_recipe_are_told(capsys, recipe):
    recipe.write_text("[model]\nhidden_sise = 3\n")

    assert main(["plan", "recipe.toml", *DEVICES]) == 2

    assert "did you mean model.hidden_size" in capsys.readouterr().err
