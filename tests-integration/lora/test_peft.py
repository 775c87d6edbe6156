"""Adapters go to PEFT and come from PEFT: same model, same adapter, same logits. Needs transformers and peft."""

import pytest
import torch
from nxd_lora import LoraConfig, LoraModel, load_peft_adapter, read_peft_config, save_peft_adapter

peft = pytest.importorskip("peft", reason="comparing with PEFT needs it: pip install peft")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "linears": {"target_modules": LINEARS},
    "rslora": {"target_modules": ["q_proj", "o_proj"], "use_rslora": True},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "dora": {"target_modules": LINEARS, "use_dora": True},
    "all-linear": {"target_modules": "all-linear", "use_dora": True, "use_rslora": True},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "layers.1.mlp"]},
    "regex": {"target_modules": r".*layers\.1\..*(q|v|down)_proj"},
}
SLOW = ("all-linear", "modules to save")
CASES_IN_TURN = [pytest.param(it, marks=pytest.mark.slow) if it in SLOW else it for it in CASES]


def randomize(model):
    """Every factor and bias that trains gets values; the same on every rank, as far as it is whole."""
    torch.manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.3)


def assert_same(actual, expected, *, atol=1e-11):
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


def assert_same_but_for_norms(actual, expected):
    """transformers computes norms in float32 whatever the model's dtype, ours do not."""
    assert_same(actual, expected, atol=1e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "case",
    [pytest.param(it, marks=pytest.mark.slow) if it in ("all-linear", "modules to save") else it for it in CASES],
)
@pytest.mark.parametrize("tp", [1, 2, 4])  # with 4, ranks hold copies of the 2 key and value heads, in a layer for all
def test_adapter_of_ours_gives_the_same_logits_in_peft(
    on_tp, tmp_path, hugging_face_llama, our_llama, whole_logits, tp, case
):
    weights = hugging_face_llama().state_dict()

    def write(folder):
        config = LoraConfig(lora_rank=4, lora_alpha=6, **CASES[case])
        model = LoraModel(our_llama(weights, sequence_parallel=tp > 1), config).eval()
        randomize(model)
        save_peft_adapter(model, folder)
        return whole_logits(model)

    logits = on_tp(tp, write, tmp_path / "adapter")[0]
    model = peft.PeftModel.from_pretrained(hugging_face_llama(), tmp_path / "adapter")

    assert_same_but_for_norms(whole_logits(model), logits)
    assert not torch.allclose(whole_logits(hugging_face_llama()), logits, atol=1e-3)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "case",
    [pytest.param(it, marks=pytest.mark.slow) if it in ("all-linear", "modules to save") else it for it in CASES],
)
@pytest.mark.parametrize("tp", [1, 2, 4])  # with 4, ranks hold copies of the 2 key and value heads, in a layer for all
def test_adapter_of_peft_gives_the_same_logits_in_ours(
    on_tp, tmp_path, hugging_face_llama, our_llama, whole_logits, tp, case
):
    settings = CASES[case]
    model = peft.get_peft_model(hugging_face_llama(), peft.LoraConfig(r=4, lora_alpha=6, **settings)).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    weights = hugging_face_llama().state_dict()

    def read(folder):
        model = LoraModel(our_llama(weights), read_peft_config(folder)).eval()
        load_peft_adapter(model, folder)
        return whole_logits(model)

    for logits in on_tp(tp, read, tmp_path):
        assert_same_but_for_norms(logits, whole_logits(model))


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_hugging_face_model_with_biases_exchanges_adapters_with_peft(tmp_path, hugging_face_llama, whole_logits, bias):
    settings = {"attention_bias": True, "mlp_bias": True}
    config = LoraConfig(lora_rank=4, target_modules=["q_proj", "down_proj"], bias=bias, init_lora_weights="gaussian")
    ours = LoraModel(hugging_face_llama(**settings), config).eval()
    randomize(ours)
    save_peft_adapter(ours, tmp_path / "ours")

    theirs = peft.PeftModel.from_pretrained(hugging_face_llama(**settings), tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    again = LoraModel(hugging_face_llama(**settings), read_peft_config(tmp_path / "theirs")).eval()
    load_peft_adapter(again, tmp_path / "theirs")

    assert_same(whole_logits(theirs), whole_logits(ours))
    assert_same(whole_logits(again), whole_logits(ours))
    assert set(again.adapter_parameters()) == set(ours.adapter_parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alpha": 8}, "lora_alpha=6 in the adapter, 8 in the model"),
        ({"use_rslora": False}, "use_rslora=True in the adapter, False in the model"),
        ({"lora_rank": 2}, "lora_rank=4 in the adapter, 2 in the model"),
    ],
)
def test_adapter_files_of_another_scale_are_refused(tmp_path, settings, message):
    make = {"lora_rank": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["0"]}
    save_peft_adapter(LoraModel(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(**make)), tmp_path)
    other = LoraModel(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(**make | settings))

    with pytest.raises(ValueError, match=message):
        load_peft_adapter(other, tmp_path)


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["embed_tokens", "q_proj"]}, {"target_modules": LINEARS, "use_dora": True}]
)
def test_merged_weights_equal_those_that_peft_merges(tmp_path, hugging_face_llama, settings):
    ours = LoraModel(hugging_face_llama(), LoraConfig(lora_rank=4, **settings))
    randomize(ours)
    save_peft_adapter(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(hugging_face_llama(), tmp_path).merge_and_unload()

    for (name, mine), (_, other) in zip(
        ours.merge_and_unload().named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13, msg=name)


def test_adapter_is_not_written_over_another_and_every_rank_says_so(on_tp, tmp_path, hugging_face_llama, our_llama):
    weights = hugging_face_llama().state_dict()
    (tmp_path / "adapter_model.safetensors").touch()

    def write(folder):
        model = LoraModel(our_llama(weights), LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(RuntimeError, match=r"rank 0: FileExistsError.*remove it or choose another folder"):
            save_peft_adapter(model, folder)
        return True

    assert on_tp(2, write, tmp_path) == [True, True]


def test_missing_file_is_named_on_every_rank(on_tp, tmp_path, hugging_face_llama, our_llama):
    weights = hugging_face_llama().state_dict()

    def read(folder):
        model = LoraModel(our_llama(weights), LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(RuntimeError, match=r"safetensors failed on 2 of 2 ranks\n  rank 0: .*\n  rank 1: "):
            load_peft_adapter(model, folder)
        return True

    assert on_tp(2, read, tmp_path) == [True, True]
