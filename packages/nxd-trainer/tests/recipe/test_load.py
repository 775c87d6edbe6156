import json
from pathlib import Path

import pytest
from nxd_trainer.recipe import Recipe, RecipeError, load_recipe, recipe_from_dict, recipe_keys

CONTENT = {
    ".toml": 'output = "runs/a"\n[train]\nsteps = 7\n[optimizer]\nbetas = [0.8, 0.9]\nlr = 1e-3\n',
    ".yaml": "output: runs/a\ntrain:\n  steps: 7\noptimizer:\n  betas: [0.8, 0.9]\n  lr: 1e-3\n",
    ".yml": "{output: runs/a, train: {steps: 7}, optimizer: {betas: [0.8, 0.9], lr: 0.001}}",
    ".json": json.dumps({"output": "runs/a", "train": {"steps": 7}, "optimizer": {"betas": [0.8, 0.9], "lr": 1e-3}}),
}


def mistakes_of(*overrides: str, **sections: object) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as raised:
        recipe_from_dict(sections, overrides)
    return raised.value.mistakes


def test_load_nothing_gives_the_defaults():
    assert load_recipe() == Recipe()


@pytest.mark.parametrize("suffix", CONTENT)
def test_load_file_of_each_format_gives_the_same_recipe(tmp_path, suffix):
    file = tmp_path / f"small{suffix}"
    file.write_text(CONTENT[suffix])

    recipe = load_recipe(file)

    assert recipe.output == Path("runs/a")
    assert (recipe.train.steps, recipe.optimizer.betas, recipe.optimizer.lr) == (7, (0.8, 0.9), 1e-3)
    assert recipe.model == Recipe().model


@pytest.mark.parametrize("text", ["", "train:\n"])
def test_load_yaml_without_keys_gives_the_defaults(tmp_path, text):
    file = tmp_path / "empty.yaml"
    file.write_text(text)

    assert load_recipe(file) == Recipe()


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("train.steps=12", "train", "steps", 12),
        (" train.steps = 12 ", "train", "steps", 12),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.betas=0.5,0.6", "optimizer", "betas", (0.5, 0.6)),
        ("data.suffixes=.c,.h", "data", "suffixes", (".c", ".h")),
        ("data.path=/corpus/a=b", "data", "path", Path("/corpus/a=b")),
        ("data.path=~/corpus", "data", "path", Path.home() / "corpus"),
        ("data.path=none", "data", "path", None),
        ("model.vocab_size=512", "model", "vocab_size", 512),
        ("model.tie_word_embeddings=true", "model", "tie_word_embeddings", True),
        ("optimizer.schedule=linear", "optimizer", "schedule", "linear"),
    ],
)
def test_override_is_read_as_the_type_of_its_key(override, section, field, value):
    recipe = load_recipe(overrides=[override])

    assert getattr(getattr(recipe, section), field) == value


def test_zero_and_one_of_a_file_are_bools():
    parallel = recipe_from_dict({"parallel": {"zero1": 1, "sequence_parallel": 0}}).parallel

    assert parallel.zero_stage == 1  # the key of older recipes
    assert parallel.sequence_parallel is False


def test_override_beats_the_file_and_the_last_one_wins(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[train]\nsteps = 7\nseed = 3\n")

    recipe = load_recipe(file, ["train.steps=8", "train.steps=9", "output=b"])

    assert (recipe.train.steps, recipe.train.seed, recipe.output) == (9, 3, Path("b"))


@pytest.mark.parametrize(
    ("content", "overrides", "length"),
    [
        ({"steps": 7}, ["train.epochs=2"], (300, 2)),
        ({"epochs": 2}, ["train.steps=7"], (7, None)),
        ({"steps": 7, "epochs": 2}, ["train.steps=9"], (9, None)),
        ({"steps": 7}, ["train.epochs=none"], (7, None)),
        ({"epochs": 2}, ["train.epochs=none"], (300, None)),
    ],
)
def test_length_on_the_command_line_replaces_that_of_the_file(content, overrides, length):
    recipe = recipe_from_dict({"train": content}, overrides)

    assert (recipe.train.steps, recipe.train.epochs) == length


@pytest.mark.parametrize(
    ("content", "overrides"), [({"steps": 7, "epochs": 2}, []), ({"steps": 5}, ["train.steps=7", "train.epochs=2"])]
)
def test_two_lengths_of_one_source_are_refused(content, overrides):
    (mistake,) = mistakes_of(*overrides, train=content)

    assert mistake == (
        "train.steps=7 and train.epochs=2 both give the length of the run; drop train.steps to train for 2 epochs, or "
        "train.epochs to train for 7 steps"
    )


@pytest.mark.parametrize(
    ("override", "table"),
    [
        ("model.config.head_dim=64", {"head_dim": 64}),
        ("model.config.hidden_act=gelu", {"hidden_act": "gelu"}),
        ('model.config={"head_dim": 64}', {"head_dim": 64}),
        ("model.config=none", None),
    ],
)
def test_override_of_a_table_or_of_its_keys_holds_what_json_says_of_it(override, table):
    assert load_recipe(overrides=["model.type=qwen3", override]).model.config == table


def test_key_of_a_table_is_put_into_the_one_given_before_it():
    recipe = load_recipe(
        None, ["model.type=qwen3", 'model.config={"head_dim": 32}', "model.config.attention_bias=true"]
    )

    assert recipe.model.config == {"head_dim": 32, "attention_bias": True}


@pytest.mark.parametrize("value", ["null", "NaN", '{"a": [Infinity]}'])
def test_value_of_a_table_that_a_recipe_file_cannot_hold_is_refused(value):
    with pytest.raises(RecipeError, match=r"model\.config"):
        load_recipe(None, ["model.type=qwen3", f"model.config.limit={value}"])


def test_keys_of_a_table_on_the_command_line_are_put_into_that_of_the_file(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[model]\ntype = "qwen3"\n[model.config]\nhead_dim = 8\nhidden_act = "gelu"\n')

    recipe = load_recipe(file, ["model.config.head_dim=16", "model.config.layer_types=[1, 2]"])

    assert recipe.model.config == {"head_dim": 16, "hidden_act": "gelu", "layer_types": [1, 2]}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.step=4", "train.steps"),
        ("steps=4", "train.steps"),
        ("optimizer.steps=4", "train.steps"),
        ("model.hiden_size=4", "model.hidden_size"),
        ("outputs=4", "output"),
    ],
)
def test_unknown_key_names_the_nearest_one(override, nearest):
    (mistake,) = mistakes_of(override)

    assert mistake == f"unknown key {override[:-2]}; did you mean {nearest}?"


def test_unknown_key_like_no_other_says_where_all_are_listed():
    assert mistakes_of("train.xyzzy=1") == ("unknown key train.xyzzy; `nxd train --help` lists all keys",)


def test_unknown_section_names_the_nearest_one():
    assert mistakes_of(trian={"steps": 1}) == ("unknown section [trian]; did you mean [train]?",)
    assert mistakes_of("trian.steps=1") == ("unknown section [trian]; did you mean [train]?",)


def test_unknown_section_like_no_other_lists_all():
    (mistake,) = mistakes_of(xyzzy={"steps": 1})

    assert mistake.endswith(
        "sections are model, parallel, moe, pipeline, data, train, optimizer, lora, dpo, checkpoint"
    )


@pytest.mark.parametrize(
    ("section", "field", "value", "expected"),
    [
        ("train", "steps", 0, "train.steps=0 is not allowed; expected an integer at least 1"),
        ("data", "path", "a\0b", "data.path='a\\x00b' is not allowed; expected a path, or none"),
        ("train", "steps", 1.5, "train.steps=1.5 is not allowed; expected an integer at least 1"),
        ("train", "steps", True, "train.steps=True is not allowed; expected an integer at least 1"),
        ("train", "steps", "many", "train.steps='many' is not allowed; expected an integer at least 1"),
        ("train", "steps", None, "train.steps=None is not allowed; expected an integer at least 1"),
        ("train", "stop_after", 0, "train.stop_after=0 is not allowed; expected an integer at least 1, or none"),
        ("optimizer", "lr", 0, "optimizer.lr=0 is not allowed; expected a number above 0"),
        ("optimizer", "lr", "nan", "optimizer.lr='nan' is not allowed; expected a number above 0"),
        ("optimizer", "lr", [1], "optimizer.lr=[1] is not allowed; expected a number above 0"),
        (
            "optimizer",
            "min_lr_ratio",
            1.1,
            "optimizer.min_lr_ratio=1.1 is not allowed; expected a number at least 0 and at most 1",
        ),
        (
            "optimizer",
            "betas",
            [0.9],
            "optimizer.betas=[0.9] is not allowed; expected a list of 2 values, each a number at least 0 and below 1",
        ),
        ("data", "suffixes", 3, "data.suffixes=3 is not allowed; expected a list of values, each a text, or none"),
        ("data", "path", 3, "data.path=3 is not allowed; expected a path, or none"),
        (
            "parallel",
            "sequence_parallel",
            "yes",
            "parallel.sequence_parallel='yes' is not allowed; expected true or false",
        ),
        ("model", "config", "some", "model.config='some' is not allowed; expected a table of keys, or none"),
        (
            "optimizer",
            "schedule",
            "cosin",
            "optimizer.schedule='cosin' is not allowed; expected one of cosine, linear, constant, warmup_stable_decay, "
            "cosine_with_restarts, polynomial, inverse_sqrt",
        ),
    ],
)
def test_wrong_value_says_what_is_allowed(section, field, value, expected):
    assert mistakes_of(**{section: {field: value}}) == (expected,)


def test_all_mistakes_come_in_one_error():
    with pytest.raises(ValueError, match="recipe: 4 mistakes") as raised:
        recipe_from_dict({"train": {"steps": -1}, "model": {"hidden_size": 100}, "optimiser": {}}, ["train.seeds=1"])

    lines = str(raised.value).splitlines()[1:]
    assert [line.split()[1] for line in lines] == [
        "unknown",
        "unknown",
        "train.steps=-1",
        "model.num_attention_heads=8",
    ]


def test_one_mistake_is_one_line_with_the_file(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[train]\nstep = 1\n")

    with pytest.raises(ValueError, match=r"did you mean train\.steps") as raised:
        load_recipe(file)

    assert str(raised.value) == f"recipe {file}: unknown key train.step; did you mean train.steps?"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps", "override 'train.steps' has no '='; write section.key=value"),
        ("train=4", "override 'train=4': train is a section; write train.key=value"),
    ],
)
def test_override_without_key_or_value_says_how_to_write_it(override, expected):
    assert mistakes_of(override) == (expected,)


def test_section_that_is_a_value_says_so():
    assert mistakes_of(train=3) == ("train=3: train is a section; write its keys under [train]",)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "steps = = 1", "is not valid TOML"),
        ("a.yaml", "train: [", "is not valid YAML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.yaml", "- 1", "holds a list; expected sections with keys"),
        ("a.ini", "", "has suffix '.ini'; expected .toml, .yaml, .yml or .json"),
    ],
)
def test_file_that_is_no_recipe_gives_one_line(tmp_path, name, text, expected):
    file = tmp_path / name
    file.write_text(text)

    with pytest.raises(RecipeError) as raised:
        load_recipe(file)

    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_names_it(tmp_path):
    with pytest.raises(RecipeError, match=r"absent\.toml: does not exist; `nxd init .*absent\.toml` writes one"):
        load_recipe(tmp_path / "absent.toml")


def test_optional_keys_default_to_none():
    optional = [key for key in recipe_keys().values() if "None" in str(key.value_type)]

    assert optional
    assert all(key.default is None for key in optional)


def test_defaults_obey_their_own_bounds():
    for key in recipe_keys().values():
        assert key.parse(key.default) == key.default


def test_folders_unset_lie_in_the_output_folder():
    recipe = load_recipe(overrides=["output=runs/b"])

    assert recipe.checkpoint_folder == Path("runs/b/checkpoints")
    assert recipe.token_cache_folder == Path("runs/b/tokens")


def test_folders_given_are_kept():
    recipe = load_recipe(overrides=["checkpoint.folder=/checkpoints", "data.cache_folder=/cache"])

    assert recipe.checkpoint_folder == Path("/checkpoints")
    assert recipe.token_cache_folder == Path("/cache")


def test_last_step_is_the_earlier_end():
    assert load_recipe(overrides=["train.steps=9"]).last_step == 9
    assert load_recipe(overrides=["train.steps=9", "train.stop_after=4"]).last_step == 4
