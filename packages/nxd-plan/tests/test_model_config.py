"""Sizes come from a Hugging Face config.json, from numbers, or both; what does not make a model is named."""

import json
from pathlib import Path

import nxd_ckpt
import pytest
import torch
from nxd_engine import save_checkpoint
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_plan import OwnLlama, TransformersModel, planned_model, read_recipe, recipes

transformers = pytest.importorskip("transformers")

CONTENT = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    **{name: CONTENT[name] for name in CONTENT if name not in ("model_type", "torch_dtype")},
    "head_dim": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def write(tmp_path):
    def write(content):
        file = tmp_path / "config.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return write


def without(*names):
    return {name: value for name, value in CONTENT.items() if name not in names}


def test_a_config_json_gives_the_sizes_of_the_model(write):
    config = planned_model(write(CONTENT))
    assert config == OwnLlama(LlamaConfig(128, 64, 96, 2, 4, 2, 512, tie_word_embeddings=True))


def test_the_folder_of_a_config_json_will_do(write):
    assert planned_model(write(CONTENT).parent) == planned_model(write(CONTENT))


def test_numbers_go_before_those_of_the_file_and_none_counts_as_not_given(write):
    config = planned_model(write(CONTENT), {"num_hidden_layers": 7, "hidden_size": None}).config
    assert (config.num_hidden_layers, config.hidden_size) == (7, 64)


def test_without_key_value_heads_there_are_as_many_as_query_heads(write):
    assert planned_model(write(without("num_key_value_heads"))).config.num_key_value_heads == 4


def test_missing_keys_are_all_named_with_their_flags(write):
    with pytest.raises(ValueError, match=r"missing vocab_size, hidden_size; .*--vocab-size N --hidden-size N"):
        planned_model(write(without("vocab_size", "hidden_size")))


def test_without_a_file_the_sizes_that_are_not_given_are_named():
    with pytest.raises(ValueError, match="the flags: missing vocab_size, intermediate_size"):
        planned_model(None, {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([1], "holds a list"),
        ({**CONTENT, "model_type": "lama"}, "model.type=lama is not a language model in transformers; did you"),
        ({**CONTENT, "model_type": "vit"}, "model.type=vit is not a language model"),
        ({**CONTENT, "model_type": "bert"}, "is_decoder=False sees the tokens that it should predict"),
        ({**CONTENT, "hidden_size": "64"}, "hidden_size='64'"),
        ({**CONTENT, "num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({**CONTENT, "num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
    ],
)
def test_a_file_that_is_no_config_of_a_language_model_is_refused(write, content, message):
    with pytest.raises(ValueError, match=message):
        planned_model(write(content))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json cannot be read"):
        planned_model(tmp_path / "nothing.json")


def test_the_base_of_rotary_frequencies_is_found_where_transformers_5_writes_it(write):
    config = planned_model(write({**CONTENT, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})).config
    assert config.rope_theta == 5e5


@pytest.mark.parametrize("further", [{"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 32}])
def test_a_llama_that_ours_cannot_be_is_planned_as_one_of_transformers(write, further):
    model = planned_model(write({**CONTENT, **further}))
    whole = model.outline()
    assert isinstance(model, TransformersModel)
    assert all(getattr(whole.config, name) == value for name, value in further.items())


def test_a_checkpoint_says_the_sizes_of_its_model(tmp_path):
    config = LlamaConfig(128, 64, 96, 2, 4, 2, 512, rope_theta=5e5, rms_norm_eps=1e-5)
    save_checkpoint(tmp_path, "a", LlamaForCausalLM(config))

    assert planned_model(tmp_path) == OwnLlama(config)


def test_a_checkpoint_of_a_model_of_transformers_says_its_config(tmp_path):
    config = transformers.Qwen3Config(**QWEN3)
    save_checkpoint(tmp_path, "a", transformers.Qwen3ForCausalLM(config))

    model = planned_model(tmp_path)
    assert isinstance(model, TransformersModel)
    assert model.recipe_section()["type"] == "qwen3"
    assert shapes(model) == {
        name: it.shape for name, it in transformers.Qwen3ForCausalLM(config).named_parameters(remove_duplicate=False)
    }


def shapes(model):
    return {name: it.shape for name, it in model.outline().named_parameters(remove_duplicate=False)}


def test_a_checkpoint_of_what_is_no_language_model_is_refused(tmp_path):
    description = {"config": {**CONTENT, "model_type": "vit"}}
    nxd_ckpt.save(tmp_path, "a", {"weight": torch.zeros(1)}, objects={"model": description})

    with pytest.raises(ValueError, match=r"model.type=vit is not a language model"):
        planned_model(tmp_path)


def test_numbers_that_the_architecture_does_not_have_are_named(write):
    with pytest.raises(ValueError, match=r"hiden_size is not a key of Qwen3Config; did you mean hidden_size"):
        planned_model(write({**QWEN3, "model_type": "qwen3"}), {"hiden_size": 32})


def test_a_recipe_without_the_package_that_reads_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(recipes, "entry_points", lambda group: [])

    with pytest.raises(
        ValueError, match=r"run\.toml is a recipe, and planning one needs nxd-trainer: pip install nxd-trai"
    ):
        read_recipe(Path("run.toml"))
