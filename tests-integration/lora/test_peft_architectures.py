"""Models of transformers adapted here at any layout are those that PEFT adapts: layers, logits, gradients and files."""

import nxd_state
import pytest
import torch
from neuronx_distributed.trainer import initialize_parallel_model, neuronx_distributed_config
from nxd_layers.hf import parallelize
from nxd_lora import LoraModel, gather_adapter, load_peft_adapter, read_peft_config, save_peft_adapter
from nxd_parity import InFloat64
from safetensors.torch import load_file

peft = pytest.importorskip("peft", reason="comparing with PEFT needs it: pip install peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(16).view(2, 8) % 11
SIZES = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
CONFIGS = {
    "gemma": {"head_dim": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "gemma2": {"head_dim": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "gpt2": {"n_positions": 16, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "minicpm3": {**LATENT, "num_key_value_heads": 4},
    "llama": {"num_key_value_heads": 2},
    "tied llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
}
CASES = {
    "gemma": {"target_modules": ["embed_tokens", "q_proj"]},
    "gemma2": {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
    "gpt2": {"target_modules": r".*(c_attn|c_proj|c_fc|lm_head)", "fan_in_fan_out": True},
    "minicpm3": {"target_modules": "all-linear"},
    "llama": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "tied llama": {"target_modules": ["q_proj", "lm_head"]},
}


def make(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.removeprefix("tied "), **SIZES, **CONFIGS[name])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def filled(tensors):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(it.shape, generator=generator, dtype=it.dtype) * 0.3 for name, it in sorted(tensors.items())
    }


def adapted_by_peft(name, folder):
    """Logits and gradients by the names in the files, which are written to `folder`."""
    settings = CASES[name]
    model = peft.get_peft_model(make(name), peft.LoraConfig(r=4, lora_alpha=6, **settings))
    trained = {name: it for name, it in model.named_parameters() if it.requires_grad}
    with torch.no_grad():
        for parameter, values in zip([it for _, it in sorted(trained.items())], filled(trained).values(), strict=True):
            parameter.copy_(values)
    logits = model.eval()(TOKENS).logits
    logits.square().mean().backward()
    model.save_pretrained(folder)
    own = {name.replace(".default", "").replace(".modules_to_save", ""): it.grad for name, it in trained.items()}
    return logits.detach(), own


def adapted_here(name, folder, target):
    """The same of the adapter in `folder`, which is written again to `target`."""
    model = parallelize(make(name))
    model = LoraModel(model, read_peft_config(folder)).eval()
    load_peft_adapter(model, folder)
    logits = model(TOKENS).logits
    logits.square().mean().backward()
    save_peft_adapter(model, target)
    for parameter in model.parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            if getattr(parameter, "sequence_parallel_enabled", False):
                grad = nxd_state.all_reduce(grad, nxd_state.active_group("tp"))
            parameter.data = grad
    return logits.detach(), gather_adapter(model)


def trained_in_a_pipeline(name, folder):
    """Loss and gradients, by whole names, of the adapter in `folder`."""
    config = neuronx_distributed_config(
        pipeline_parallel_size=2,
        pipeline_config={"num_microbatches": 2, "auto_partition": True, "broadcast_and_average_loss": True},
        lora_config=read_peft_config(folder),
    )
    with InFloat64():
        model = initialize_parallel_model(config, lambda: make(name))
        load_peft_adapter(model.lora_model, folder)
        loss = model.run_train(input_ids=TOKENS, labels=TOKENS)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    return loss.detach(), gather_adapter(model.lora_model)


def in_file(name):
    return f"base_model.model.{name}" + (".weight" if name.endswith(("lora_A", "lora_B")) else "")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp", [1, 2])
def test_adapter_of_peft_gives_the_same_logits_gradients_and_files(on_tp, tmp_path, tp, name):
    expected, grads = adapted_by_peft(name, tmp_path / "theirs")

    [(logits, own_grads), *_] = on_tp(tp, adapted_here, name, tmp_path / "theirs", tmp_path / "ours")

    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    own_grads = {in_file(name): it for name, it in own_grads.items()}
    assert own_grads.keys() == grads.keys()
    for grad, its_own in zip(*[[it[key] for key in sorted(it)] for it in (grads, own_grads)], strict=True):
        torch.testing.assert_close(its_own, grad, rtol=1e-8, atol=1e-12)
    theirs, ours = (load_file(tmp_path / it / "adapter_model.safetensors") for it in ("theirs", "ours"))
    assert ours.keys() == {name for name in theirs if ".base_layer." not in name}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_adapter_of_peft_on_a_tied_head_trains_alike_in_a_pipeline(run_ranks, tmp_path):
    adapted_by_peft("tied llama", tmp_path)
    model = peft.PeftModel.from_pretrained(make("tied llama"), tmp_path, is_trainable=True)
    with InFloat64():
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
    grads = {name.replace(".default", ""): it.grad for name, it in model.named_parameters() if it.requires_grad}

    for found, own_grads in run_ranks(trained_in_a_pipeline, 2, "tied llama", tmp_path):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=0)
        assert {in_file(name) for name in own_grads} == grads.keys()
        for name, grad in own_grads.items():
            torch.testing.assert_close(grad, grads[in_file(name)], rtol=1e-8, atol=1e-12)
