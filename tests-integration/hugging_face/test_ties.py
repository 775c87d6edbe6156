"""A config that ties what its files do not is not believed: the model computes as that of transformers does."""

import json

import nxd_ckpt
import pytest
import torch
from nxd_ckpt import CheckpointError
from nxd_engine import load_checkpoint
from nxd_engine.checkpoints.state import model_state
from nxd_engine.hugging_face import load_pretrained, read_model_config
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_trainer.generate import load_for_generation
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", reason="its models are compared: pip install transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TOKENS = torch.arange(20).reshape(2, 10)


@pytest.fixture
def folder(tmp_path):
    """Of a tied Llama, whose files hold another head besides."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(64, 16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_folder_with_another_head_than_its_config_ties_computes_as_that_of_transformers(folder):
    model, _ = load_for_generation(folder, tokenizer="bytes")

    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert read_model_config(folder)["tie_word_embeddings"] is False


def test_folder_with_the_same_head_twice_stays_tied_and_a_tied_model_takes_no_other(folder):
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"'lm_head.weight' is in the folder, but not in the model"):
        load_pretrained(tied, folder)

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    load_pretrained(tied, folder)
    assert torch.equal(tied.lm_head.weight, tensors["lm_head.weight"])
    assert read_model_config(folder) == json.loads((folder / "config.json").read_text())


def test_checkpoint_of_an_untied_model_does_not_fill_a_tied_one(tmp_path):
    untied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    nxd_ckpt.save(tmp_path, "a", model_state(untied))

    with pytest.raises(CheckpointError, match=r"values for lm_head.weight and .*, which are one tied weight"):
        load_checkpoint(tmp_path, "a", model=tied)

    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.model.embed_tokens.weight)
    nxd_ckpt.save(tmp_path, "b", model_state(untied))
    load_checkpoint(tmp_path, "b", model=tied)
