"""Sizes come from a Hugging Face config.json, from numbers, or both; what does not make a Llama is named."""

import json

import nxd_ckpt
import pytest
import torch
from nxd_trainer.api import save_checkpoint
from nxd_trainer.models import LlamaConfig, LlamaForCausalLM
from nxd_trainer.plan import model_config

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
    config = model_config(write(CONTENT))
    assert config == LlamaConfig(128, 64, 96, 2, 4, 2, 512, tie_word_embeddings=True)


def test_the_folder_of_a_config_json_will_do(write):
    assert model_config(write(CONTENT).parent) == model_config(write(CONTENT))


def test_numbers_go_before_those_of_the_file_and_none_counts_as_not_given(write):
    config = model_config(write(CONTENT), {"num_hidden_layers": 7, "hidden_size": None})
    assert (config.num_hidden_layers, config.hidden_size) == (7, 64)


def test_without_key_value_heads_there_are_as_many_as_query_heads(write):
    assert model_config(write(without("num_key_value_heads"))).num_key_value_heads == 4


def test_missing_keys_are_all_named_with_their_flags(write):
    with pytest.raises(ValueError, match=r"no vocab_size, hidden_size; .*--vocab-size N --hidden-size N"):
        model_config(write(without("vocab_size", "hidden_size")))


def test_without_a_file_the_sizes_that_are_not_given_are_named():
    with pytest.raises(ValueError, match="the flags: no vocab_size, intermediate_size"):
        model_config(None, {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ([1], "holds a list"),
        ({**CONTENT, "model_type": "gpt2"}, "model_type='gpt2'"),
        ({**CONTENT, "hidden_size": "64"}, "hidden_size='64'"),
        ({**CONTENT, "num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({**CONTENT, "num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({**CONTENT, "head_dim": 32}, "head_dim=32"),
    ],
)
def test_a_file_that_is_no_config_of_a_llama_is_refused(write, content, message):
    with pytest.raises(ValueError, match=message):
        model_config(write(content))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json cannot be read"):
        model_config(tmp_path / "nothing.json")


def test_the_base_of_rotary_frequencies_is_found_where_transformers_5_writes_it(write):
    config = model_config(write({**CONTENT, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}))
    assert config.rope_theta == 5e5


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_layers_with_biases_are_refused_and_not_planned_without_them(write, name):
    with pytest.raises(ValueError, match=f"{name}=true; layers with biases cannot be planned"):
        model_config(write({**CONTENT, name: True}))


def test_a_checkpoint_says_the_sizes_of_its_model(tmp_path):
    config = LlamaConfig(128, 64, 96, 2, 4, 2, 512, rope_theta=5e5, rms_norm_eps=1e-5)
    save_checkpoint(tmp_path, "a", LlamaForCausalLM(config))

    assert model_config(tmp_path) == config


def test_a_checkpoint_of_another_kind_of_model_is_refused(tmp_path):
    description = {"config": {**CONTENT, "model_type": "gpt2"}}
    nxd_ckpt.save(tmp_path, "a", {"weight": torch.zeros(1)}, objects={"model": description})

    with pytest.raises(ValueError, match="model_type='gpt2'; plans are made with the layers of a Llama"):
        model_config(tmp_path)
