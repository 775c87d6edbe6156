"""What checkpoints say of their tensors and of their model."""

from types import SimpleNamespace

import nxd_ckpt
import pytest
import torch
from nxd_engine import save_checkpoint
from nxd_engine.checkpoints.model_description import (
    describe_llama,
    describe_model,
    description_of,
    find_description,
    model_dtype,
    own_llama_config,
)
from nxd_engine.checkpoints.state import kind_of, model_state
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from torch import nn

CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    rope_theta=50.0,
    rms_norm_eps=0.25,
    tie_word_embeddings=True,
    initializer_range=0.5,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.norm.weight", "model"),
        ("optimizer.weight", "model"),  # a module's name
        ("optimizer/model.norm.weight/exp_avg", "optimizer"),
        ("optimizer_state_dict/pp_rank_00_of_01-tp_rank_00_of_01", "optimizer"),
        ("rng/rank-00000/default/cpu", "run"),
    ],
)
def test_name_says_what_a_tensor_is_of(name, kind):
    assert kind_of(name) == kind


def test_llama_of_ours_comes_back_from_its_description():
    assert describe_llama(CONFIG).own_llama() == CONFIG


def test_checkpoint_of_a_script_says_its_model(tmp_path):
    save_checkpoint(tmp_path, "a", model=LlamaForCausalLM(CONFIG, dtype=torch.bfloat16))

    checkpoint = nxd_ckpt.open_checkpoint(tmp_path, "a")

    assert description_of(checkpoint).own_llama() == CONFIG
    assert model_dtype(checkpoint) == torch.bfloat16


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(LlamaForCausalLM(CONFIG))])
def test_other_models_are_not_described(model):
    assert describe_model(model, model) is None


def test_config_of_another_kind_is_not_described():
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(num_attention_heads=2)

    assert describe_model(model, model) is None


def test_checkpoint_without_a_model_says_so(tmp_path):
    save_checkpoint(tmp_path, "a", user_content=1)

    with pytest.raises(ValueError, match=r"'a' holds no model"):
        description_of(nxd_ckpt.open_checkpoint(tmp_path, "a"))


def test_checkpoint_that_is_not_described_says_what_to_do(tmp_path):
    nxd_ckpt.save(tmp_path, "a", model_state(LlamaForCausalLM(CONFIG)), objects={"model": {"depth": 3}})

    with pytest.raises(ValueError, match=r"does not say which model it holds; pass a folder of the same model"):
        description_of(nxd_ckpt.open_checkpoint(tmp_path, "a"))


@pytest.mark.parametrize(
    "objects",
    [
        None,
        {"recipe": "x"},
        {"recipe": {"data": None}, "model": {"vocab_size": 8}},
        {"recipe": {}, "model": {}},
        {"hugging_face": "gpt2"},
        {"hugging_face": {"tensors": {}}},
        {"model": "llama"},
        {"model": {"config": ["llama"]}},
    ],
)
def test_strange_objects_describe_no_model(objects):
    assert find_description(SimpleNamespace(objects=objects)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": "x"}, "rope_parameters='x' is not a table"),
        ({"hidden_size": "8"}, "must be numbers; got hidden_size='8'"),
        ({"model_type": "gpt2"}, "is not a LlamaForCausalLM"),
    ],
)
def test_strange_config_is_refused_with_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        own_llama_config(describe_llama(CONFIG).config | change)


def test_rope_type_of_llama_3_is_read_from_both_spellings_and_written():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    new = {"model_type": "llama", "rope_parameters": {**llama3, "rope_theta": 5e5}}
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}}

    found = own_llama_config(new)

    assert (found.rope_theta, found.rope_scaling) == (5e5, llama3)
    assert own_llama_config(old) == found
    assert describe_llama(found).own_llama() == found
