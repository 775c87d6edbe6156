import json
import tomllib

import pytest
from nxd_cli import main
from nxd_trainer.recipe import (
    Recipe,
    load_recipe,
    recipe_from_dict,
    recipe_keys,
    recipe_to_dict,
    save_recipe,
)

CHANGED = [
    "train.steps=9",
    "train.stop_after=3",
    "optimizer.lr=1e-5",
    "optimizer.betas=0.5,0.25",
    "data.suffixes=.a,.b",
    'data.path=/with "quotes" \\ and\ttab é\x7f',
    "model.tie_word_embeddings=true",
    "model.vocab_size=1024",
    "model.type=qwen3",
    'model.config={"head_dim": 8, "layer_types": ["a", "b"], "rope parameters": {"rope_theta": 1e6, "is_it": true}}',
    "model.config.attention_dropout=0.5",
    "output=runs/x",
]


@pytest.mark.parametrize("overrides", [[], CHANGED, ["train.epochs=2"]], ids=["defaults", "changed", "epochs"])
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_saved_recipe_loads_back_equal(tmp_path, suffix, overrides):
    recipe = load_recipe(overrides=overrides)

    file = save_recipe(recipe, tmp_path / "run" / f"recipe{suffix}")

    assert load_recipe(file) == recipe


@pytest.mark.parametrize("overrides", [[], CHANGED, ["train.epochs=2"]], ids=["defaults", "changed", "epochs"])
def test_recipe_to_dict_is_plain_json_and_comes_back_equal(overrides):
    recipe = load_recipe(overrides=overrides)

    content = json.loads(json.dumps(recipe_to_dict(recipe)))

    assert recipe_from_dict(content) == recipe


def test_saved_toml_holds_every_set_key_with_its_meaning(tmp_path):
    text = save_recipe(Recipe(), tmp_path / "recipe.toml").read_text()
    content = tomllib.loads(text)

    for key in recipe_keys().values():
        if key.default is None:
            continue
        section = content[key.section] if key.section else content
        assert key.field in section
        assert f"  # {key.description}\n" in text


@pytest.mark.parametrize("chosen", ["model.path=Qwen3-0.6B", "model.factory=my_models:make"])
def test_sizes_of_our_llama_are_not_saved_with_a_model_that_has_its_own(tmp_path, chosen):
    recipe = load_recipe(overrides=[chosen])

    file = save_recipe(recipe, tmp_path / "recipe.json")

    assert list(json.loads(file.read_text())["model"]) == [chosen.partition("=")[0].removeprefix("model.")]
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


def test_save_with_another_suffix_says_what_is_allowed(tmp_path):
    with pytest.raises(ValueError, match=r"suffix '\.txt'; expected \.toml or \.json"):
        save_recipe(Recipe(), tmp_path / "recipe.txt")


def test_help_lists_every_key_with_default_and_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())

    for key in recipe_keys().values():
        assert f"--{key.name} " in text
        assert f"{key.description} (default: " in text
    assert "--optimizer.betas float,float adamw, muon: decay rates of the two moments (default: 0.9,0.95)" in text
    assert "--parallel.sequence_parallel [{true,false}] " in text
