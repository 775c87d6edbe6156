"""`nxd upcycle`: the loss of the mixture is that of the dense model it was made of."""

import json

import pytest
import torch
from nxd_cli.dispatch import main
from nxd_parity import InFloat64

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
}
IDS = torch.arange(3, 27).view(3, 8)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": ("mixtral", {"tie_word_embeddings": True}),
    "llama with scaled positions": (
        "mixtral",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8}, "rms_norm_eps": 1e-3},
    ),
    "mistral": ("mixtral", {"sliding_window": 4}),
    "qwen2": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("qwen3_moe", {"attention_bias": True}),
}


def make_dense(folder, name, further):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.split()[0], **SIZES, **further)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_()  # biases and norms
    model.save_pretrained(folder)


def opened(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64)


@pytest.mark.parametrize("name", [it if "qwen" in it else pytest.param(it, marks=pytest.mark.slow) for it in MODELS])
def test_loss_of_the_mixture_is_the_dense_models_to_begin_with(tmp_path, capsys, name):
    model_type, further = MODELS[name]
    make_dense(tmp_path / "dense", name, further)

    arguments = ["upcycle", str(tmp_path / "dense"), str(tmp_path / "mixture"), "--experts", "8", "--top-k", "3"]
    assert main([*arguments, "--max-shard-size", "20KB"]) == 0

    assert f"wrote {tmp_path / 'mixture'}" in capsys.readouterr().out
    assert len(list((tmp_path / "mixture").glob("*.safetensors"))) > 1
    dense, mixture = opened(tmp_path / "dense"), opened(tmp_path / "mixture")
    assert mixture.config.model_type == model_type
    with InFloat64():
        expected, found = (model(input_ids=IDS, labels=IDS).loss for model in (dense, mixture))
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    experts = mixture.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert experts.shape[0] == 8
    assert all((experts.grad[0] - it).any() for it in experts.grad[1:]), "experts learn alike, and will stay copies"


def test_what_cannot_be_upcycled_is_refused_in_one_line(tmp_path, capsys):
    make_dense(tmp_path / "biased", "llama", {"attention_bias": True})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    capsys.readouterr()
    for arguments, message in (
        (["biased", "--experts", "4"], "self_attn.k_proj.bias, but MixtralForCausalLM has no biases"),
        (["biased", "--experts", "4", "--top-k", "5"], "--experts 4 --top-k 5: use 2 or more experts"),
        (["other", "--experts", "4"], "'gpt2'; those of llama, mistral, qwen2, qwen3 can be upcycled"),
        (["nowhere", "--experts", "4"], "config.json does not exist"),
    ):
        folder, *options = arguments
        assert main(["upcycle", str(tmp_path / folder), str(tmp_path / "mixture"), *options]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "mixture").exists()
