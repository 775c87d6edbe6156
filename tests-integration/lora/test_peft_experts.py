"""Adapters of experts go to PEFT and come from it: its `target_parameters`, at any expert-parallel degree."""

import pytest
import torch
from nxd_layers.hf import parallelize
from nxd_lora import LoraConfig, LoraModel, load_peft_adapter, read_peft_config, save_peft_adapter
from nxd_parity import InFloat64
from nxd_state import initialize_model_parallel

peft = pytest.importorskip("peft", reason="comparing with PEFT needs it: pip install peft")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
TOKENS = torch.arange(16).view(2, 8) % 11
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "mixtral": {"target_parameters": BOTH, "target_modules": ["q_proj"]},
    "qwen3_moe": {"target_parameters": ["experts.down_proj"], "use_rslora": True},
    "gpt_oss": {"target_parameters": ["layers.1.mlp.experts.gate_up_proj"], "target_modules": ["o_proj"]},
}
LAYOUTS = {"one rank": (1, 1, 1), "EP 2": (2, 1, 2), "TP 2": (2, 2, 1)}


def make(model_type):
    config = transformers.AutoConfig.for_model(model_type, **SIZES, use_cache=False)
    config._experts_implementation = "eager"  # grouped products know no float64
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def logits_of(model):
    with torch.no_grad(), InFloat64():
        return model(TOKENS).logits


def randomize(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_adapter_of_experts_gives_the_same_logits_here_and_in_peft(run_ranks, tmp_path, layout, case):
    ranks, tp, ep = LAYOUTS[layout]
    settings = {"target_modules": [], **CASES[case]}
    theirs = peft.get_peft_model(make(case), peft.LoraConfig(r=3, lora_alpha=6, **settings)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = logits_of(theirs)

    def job():
        initialize_model_parallel(tp, 1, ep)
        whole = make(case)
        plain = parallelize(whole, expert_parallel=ep > 1) if ranks > 1 else whole
        model = LoraModel(plain, read_peft_config(tmp_path / "theirs")).eval()
        load_peft_adapter(model, tmp_path / "theirs")
        save_peft_adapter(model, tmp_path / "ours")
        return logits_of(model)

    for logits in run_ranks(job, ranks):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)
    assert not torch.allclose(logits_of(make(case)), expected, atol=1e-3)
    again = peft.PeftModel.from_pretrained(make(case), tmp_path / "ours").eval()
    torch.testing.assert_close(logits_of(again), expected, rtol=0, atol=1e-11)


def test_adapter_of_experts_that_transformers_made_from_a_config_merges_as_in_peft(tmp_path):
    ours = LoraModel(make("mixtral"), LoraConfig(lora_rank=3, target_parameters=BOTH))
    randomize(ours)
    save_peft_adapter(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(make("mixtral"), tmp_path).merge_and_unload()

    for (name, mine), (_, other) in zip(
        ours.merge_and_unload().named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13, msg=name)
