"""`LoraConfig`: defaults, scale, mistakes; and its form in `adapter_config.json`."""

import json

import pytest
from nxd_lora import LoraConfig, LoRAModel, LoraModel, adapter_config, config_from_adapter_config
from torch import nn


def test_config_has_the_documented_defaults():
    config = LoraConfig()

    assert (config.enable_lora, config.lora_rank, config.lora_alpha, config.lora_dropout) == (True, 16, 8, 0.0)
    assert (config.bias, config.use_rslora, config.init_lora_weights) == ("none", False, "default")
    assert (config.save_lora_base, config.merge_lora, config.load_lora_from_ckpt) == (False, False, False)
    assert LoRAModel is LoraModel


def test_config_takes_the_flag_of_scripts_that_merge_shards():
    assert LoraConfig(merge_sharded_lora=False) != LoraConfig()
    with pytest.raises(ValueError, match="merge_sharded_lora='no' must be True or False"):
        LoraConfig(merge_sharded_lora="no")


def test_scale_is_alpha_over_rank_or_over_its_root():
    assert LoraConfig(lora_rank=16, lora_alpha=32).scale == 2
    assert LoraConfig(lora_rank=16, lora_alpha=32, use_rslora=True).scale == 8


def test_config_with_mistakes_lists_them_all():
    with pytest.raises(ValueError, match="LoraConfig: ") as raised:
        LoraConfig(
            lora_rank=0,
            lora_alpha=-1,
            lora_dropout=1.0,
            bias="some",
            target_modules="(",
            use_rslora="yes",
            init_lora_weights="pissa",
            merge_lora=True,
            load_lora_from_ckpt=True,
        )

    names = [
        "lora_rank=0",
        "lora_alpha=-1",
        "lora_dropout=1.0",
        "bias='some'",
        "target_modules='('",
        "use_rslora='yes'",
    ]
    names += ["init_lora_weights='pissa'", "merge_lora=True", "load_lora_from_ckpt=True"]
    assert [name for name in names if name not in str(raised.value)] == []


def test_dora_with_dropout_and_a_text_of_modules_are_refused():
    with pytest.raises(ValueError, match=r"use_dora=True does not support lora_dropout=0\.1; set it to 0"):
        LoraConfig(use_dora=True, lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"modules_to_save='lm_head' must be a list of names"):
        LoraConfig(modules_to_save="lm_head")


@pytest.mark.parametrize("targets", [[], [""], "", [1], 3])
def test_config_with_unusable_targets_raises(targets):
    with pytest.raises(ValueError, match="target_modules"):
        LoraConfig(target_modules=targets)


def test_description_of_an_adapter_gives_its_config_back():
    config = LoraConfig(
        lora_rank=4,
        lora_alpha=12.5,
        lora_dropout=0.1,
        bias="lora_only",
        target_modules=["q_proj"],
        use_rslora=True,
        init_lora_weights="gaussian",
    )
    model = LoraModel(nn.ModuleDict({"q_proj": nn.Linear(3, 2), "k_proj": nn.Linear(3, 2)}), config)

    assert config_from_adapter_config(json.loads(json.dumps(adapter_config(model)))) == config


def test_description_names_layers_whole_where_others_end_alike():
    blocks = {str(i): nn.ModuleDict({"proj": nn.Linear(2, 2), "out": nn.Linear(2, 2)}) for i in range(2)}
    model = LoraModel(nn.ModuleDict(blocks), LoraConfig(target_modules=r"0\.proj|\d\.out"))

    assert adapter_config(model)["target_modules"] == ["0.proj", "out"]


def test_description_that_asks_for_more_than_is_supported_is_refused():
    content = {
        "peft_type": "LORA",
        "r": 4,
        "alora_invocation_tokens": [1],
        "rank_pattern": {"q": 8},
        "init_lora_weights": "pissa",
    }

    with pytest.raises(
        ValueError, match=r"alora_invocation_tokens=\[1\], rank_pattern=\{'q': 8\}, init_lora_weights='pissa'"
    ):
        config_from_adapter_config(content)


def test_description_of_another_method_is_refused():
    with pytest.raises(ValueError, match="not the config of a LoRA adapter: peft_type='IA3'"):
        config_from_adapter_config({"peft_type": "IA3"})
