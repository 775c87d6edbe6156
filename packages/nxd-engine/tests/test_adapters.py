"""Adapters of a config in one process: what loads into what, and what is refused."""

import pytest
import torch
from nxd_ckpt import CheckpointError, list_checkpoints
from nxd_engine import initialize_parallel_model, load_checkpoint, neuronx_distributed_config, save_checkpoint
from nxd_engine.models import LlamaForCausalLM
from nxd_lora import LoraConfig, LoraModel

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def make(llama_config):
    """`make(seed, **lora)`: a model with adapters that add something; without arguments for them a plain one."""

    def make_model(seed=0, **lora):
        config = LoraConfig(**{"lora_rank": 2, "target_modules": ["q_proj", "embed_tokens"], **lora}) if lora else None
        torch.manual_seed(seed)
        model = initialize_parallel_model(
            neuronx_distributed_config(lora_config=config), LlamaForCausalLM, llama_config
        )
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter)
        return model

    return make_model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(12).view(2, 6))


def test_merged_checkpoint_is_an_ordinary_models(make, tmp_path):
    adapted = make(save_lora_base=True, merge_lora=True)
    expected = logits(adapted)

    save_checkpoint(tmp_path, "a", adapted)

    assert torch.equal(logits(adapted), expected)
    plain = make(seed=1)
    load_checkpoint(tmp_path, model=plain)
    torch.testing.assert_close(logits(plain), expected)


def test_ordinary_checkpoint_fills_the_base_and_adapters_begin_anew(make, tmp_path):
    plain = make()
    save_checkpoint(tmp_path, "a", plain)
    adapted = make(seed=1, lora_rank=2)
    before = adapted.state_dict()["model.layers.0.self_attn.q_proj.lora_A"].clone()

    load_checkpoint(tmp_path, model=adapted)

    assert torch.equal(logits(adapted), logits(plain))
    factors = adapted.state_dict()
    assert torch.equal(factors["model.layers.0.self_attn.q_proj.lora_A"], before)  # so that B gets a gradient
    assert factors["model.layers.0.self_attn.q_proj.lora_B"].count_nonzero() == 0
    assert factors["model.embed_tokens.lora_embedding_A"].count_nonzero() == 0
    assert factors["model.embed_tokens.lora_embedding_B"].count_nonzero() > 0


def test_lora_model_without_a_config_is_saved_by_its_own(llama_config, tmp_path):
    def wrapped(seed):
        torch.manual_seed(seed)
        return LoraModel(LlamaForCausalLM(llama_config), LoraConfig(lora_rank=2, target_modules=["q_proj"]))

    saved, loaded = wrapped(0), wrapped(1)
    save_checkpoint(tmp_path, "a", saved)

    load_checkpoint(tmp_path, model=loaded)

    for name, parameter in saved.adapter_parameters().items():
        assert torch.equal(loaded.adapter_parameters()[name], parameter)
    assert not torch.equal(loaded.module.lm_head.weight, saved.module.lm_head.weight)


def test_description_is_written_beside_again_when_a_tag_is_saved_again(make, tmp_path):
    model = make(save_lora_config_adapter=False)
    file = tmp_path / "a" / "lora_adapter" / "adapter_config.json"

    for _ in range(2):
        save_checkpoint(tmp_path, "a", model)
        assert '"peft_type": "LORA"' in file.read_text()
    save_checkpoint(tmp_path, "b", make(lora_rank=2), num_kept_ckpts=1)

    assert [info.tag for info in list_checkpoints(tmp_path)] == ["b"]


def test_what_does_not_fit_is_refused_by_load_and_by_the_config(make, tmp_path):
    save_checkpoint(tmp_path / "adapter", "a", make(lora_rank=2))
    save_checkpoint(tmp_path / "plain", "a", make())

    with pytest.raises(CheckpointError, match="holds only an adapter; make the model with lora_config"):
        load_checkpoint(tmp_path / "adapter", model=make())
    with pytest.raises(CheckpointError, match="lora_alpha=8 in the adapter, 3 in the model"):
        load_checkpoint(tmp_path / "adapter", model=make(lora_alpha=3))
    with pytest.raises(CheckpointError, match=r"it lacks model\.layers\.0\.self_attn\.v_proj\.lora_A"):
        load_checkpoint(tmp_path / "adapter", model=make(target_modules=["q_proj", "v_proj", "embed_tokens"]))
    with pytest.raises(CheckpointError, match="holds no LoRA adapter"):
        make(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path / "plain"))
    with pytest.raises(ValueError, match="'q_prj' matches nothing"):
        make(target_modules=["q_prj"])


def test_adapters_in_the_weights_are_neither_saved_nor_loaded_over(make, tmp_path):
    model = make(save_lora_base=True)
    save_checkpoint(tmp_path, "a", model)
    model.lora_model.merge()

    with pytest.raises(ValueError, match=r"unmerge\(\) first"):
        save_checkpoint(tmp_path, "b", model)
    with pytest.raises(CheckpointError, match=r"unmerge\(\) before loading"):
        load_checkpoint(tmp_path, model=model)

    assert model.lora_model.is_merged
    assert [info.tag for info in list_checkpoints(tmp_path)] == ["a"]


def test_weight_that_is_tied_cannot_be_merged_and_nothing_is_saved(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.table.weight

    lora = LoraConfig(target_modules=["head"], save_lora_base=True, merge_lora=True)
    model = initialize_parallel_model(neuronx_distributed_config(lora_config=lora), Tied)

    with pytest.raises(ValueError, match=r"table\.weight and head\.weight are one tied weight"):
        save_checkpoint(tmp_path, "a", model)

    assert list_checkpoints(tmp_path) == []
