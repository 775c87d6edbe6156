"""Weights of checkpoints with a LoRA adapter, as readers without adapters have them."""

from dataclasses import replace

import nxd_ckpt
import pytest
import torch
from nxd_ckpt import open_checkpoint
from nxd_engine import save_checkpoint
from nxd_engine.checkpoints.merged_weights import model_weights
from nxd_engine.checkpoints.model_description import description_of
from nxd_engine.checkpoints.state import model_state
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_lora import LoraConfig, LoraModel
from nxd_trainer.generate import load_for_generation

CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
DORA = {"use_dora": True, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def adapted(config=CONFIG, dtype=torch.float64, **settings) -> LoraModel:
    """A model whose adapter changes every layer that has one."""
    torch.manual_seed(0)
    targets = {"target_modules": ["embed_tokens", "q_proj", "down_proj"], "lora_rank": 3, "use_rslora": True}
    model = LoraModel(LlamaForCausalLM(config, dtype=dtype), LoraConfig(**targets | settings))
    for parameter in model.factors().values():
        torch.nn.init.normal_(parameter)
    return model


def weights_in(folder, tag):
    checkpoint = open_checkpoint(folder, tag)
    return model_weights(checkpoint, description_of(checkpoint))


@pytest.mark.parametrize("further", [{}, DORA], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.0)])
def test_adapter_beside_its_base_is_merged_as_the_model_would(tmp_path, dtype, tolerance, further):
    save_checkpoint(tmp_path, "apart", adapted(dtype=dtype, save_lora_base=True, **further))
    save_checkpoint(tmp_path, "merged", adapted(dtype=dtype, save_lora_base=True, merge_lora=True, **further))

    apart, merged = weights_in(tmp_path, "apart"), weights_in(tmp_path, "merged")

    assert apart.tensors == merged.tensors
    for name, info in merged.tensors.items():
        expected = merged.read_box(name, (0,) * len(info.global_shape), info.global_shape)
        found = apart.read_box(name, (0,) * len(info.global_shape), info.global_shape)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("further", [{}, DORA], ids=["LoRA", "DoRA"])
def test_box_of_a_merged_weight_is_that_part_of_the_whole(tmp_path, further):
    save_checkpoint(tmp_path, "a", adapted(save_lora_base=True, **further))
    weights = weights_in(tmp_path, "a")

    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = weights.read_box(name, (0, 0), weights.tensors[name].global_shape)
        torch.testing.assert_close(weights.read_box(name, (2, 1), (5, 4)), whole[2:7, 1:5], rtol=1e-14, atol=1e-14)


def test_model_with_an_adapter_is_generated_with_as_if_it_was_merged(tmp_path):
    model = adapted(save_lora_base=True)
    save_checkpoint(tmp_path, "a", model)
    model.merge()

    found, _ = load_for_generation(tmp_path, tokenizer="bytes")

    tokens = torch.arange(6).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(found(tokens), model(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (adapted, "holds a LoRA adapter without its base model; load it with load_checkpoint"),
        (
            lambda: adapted(replace(CONFIG, tie_word_embeddings=True), save_lora_base=True),
            r"model\.embed_tokens\.weight is tied to another weight",
        ),
    ],
)
def test_adapter_that_cannot_be_merged_is_refused_with_advice(tmp_path, model, message):
    save_checkpoint(tmp_path, "a", model())

    with pytest.raises(ValueError, match=message):
        weights_in(tmp_path, "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q_PROJ}.lora_B": torch.zeros(8, 2)}, r"does not fit the model: .*q_proj\.weight is \[8, 8\]"),
        ({f"{Q_PROJ}.lora_B": torch.zeros(())}, "does not fit the model"),
        ({f"{Q_PROJ}.lora_A": torch.zeros(3)}, "does not fit the model"),
        ({f"{Q_PROJ}.weight": torch.zeros(8, 7)}, "does not fit the model"),
    ],
)
def test_factors_that_do_not_fit_their_weight_are_refused(tmp_path, change, message):
    save_checkpoint(tmp_path, "a", adapted(save_lora_base=True))
    saved = open_checkpoint(tmp_path, "a")
    nxd_ckpt.save(tmp_path, "b", {name: saved.read(name) for name in saved.tensors} | change, objects=saved.objects)

    with pytest.raises(ValueError, match=message):
        weights_in(tmp_path, "b")


def test_description_of_another_rank_than_the_factors_have_is_refused(tmp_path):
    save_checkpoint(tmp_path, "a", adapted(save_lora_base=True))
    saved = open_checkpoint(tmp_path, "a")
    described = saved.objects["lora"] | {"adapter": saved.objects["lora"]["adapter"] | {"r": 10**12}}
    state = {name: saved.read(name) for name in saved.tensors}
    nxd_ckpt.save(tmp_path, "b", state, objects=saved.objects | {"lora": described})

    with pytest.raises(ValueError, match=r"which does not match r=1000000000000; .*use the config that was saved"):
        weights_in(tmp_path, "b")


@pytest.mark.parametrize("adapter", [None, {}, {"adapter": "x"}, {"adapter": {}, "has_base": True}])
def test_adapter_that_nothing_describes_is_refused(tmp_path, adapter):
    state = model_state(LlamaForCausalLM(CONFIG))
    save_checkpoint(tmp_path, "described", LlamaForCausalLM(CONFIG))
    objects = open_checkpoint(tmp_path, "described").objects | {"lora": adapter}
    nxd_ckpt.save(tmp_path, "a", state, objects=objects)

    with pytest.raises(ValueError, match=r"adapter without a description|not the config of a LoRA adapter"):
        weights_in(tmp_path, "a")


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])  # of weights [experts, out, in] and [experts, in, out]
def test_adapter_of_experts_is_merged_as_the_model_would(tmp_path, model_type):
    transformers = pytest.importorskip("transformers", reason="its models have experts: pip install transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(model_type, **sizes, **heads)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = LoraModel(model, LoraConfig(target_parameters=targets, lora_rank=3, save_lora_base=True))
    for parameter in adapted.factors().values():
        torch.nn.init.normal_(parameter)

    save_checkpoint(tmp_path, "apart", adapted)
    adapted.merge()

    apart = weights_in(tmp_path, "apart")
    names = [f"model.layers.0.mlp.{target}" for target in targets]
    assert set(names) == set(apart.branches)
    for name in names:
        expected = model.get_parameter(name).detach()
        whole = apart.read_box(name, (0, 0, 0), expected.shape)
        part = apart.read_box(name, (1, 2, 3), (2, 4, 5))
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part, expected[1:3, 2:6, 3:8], rtol=1e-12, atol=1e-12)
