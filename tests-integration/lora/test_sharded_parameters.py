"""Adapters whose base model is sharded over the replicas (ZeRO-3): written for PEFT, read back, merged and reset."""

import pytest
import torch
from neuronx_distributed.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_lora import LoraConfig, gather_adapter, load_adapter
from nxd_state import count_traffic, destroy_model_parallel, whole_parameters

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def steps_of(stage):
    """The adapter after two steps, the loss with it merged, loaded into a new model, and reset."""
    lora = LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    config = neuronx_distributed_config(optimizer_config={"zero_stage": stage}, lora_config=lora)
    tokens = torch.randint(24, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    def make(seed):
        torch.manual_seed(seed)
        return initialize_parallel_model(config, lambda: LlamaForCausalLM(CONFIG, dtype=torch.float64))

    model = make(0)
    optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
    for _ in range(2):
        model.run_train(**batch)
        optimizer.step()
        optimizer.zero_grad()
    adapter = gather_adapter(model.lora_model)
    before = model.run_eval(**batch).item()
    with whole_parameters(model.parameters()):
        weights = {name: it.detach().clone() for name, it in model.named_parameters()}
    model.lora_model.merge()
    merged = model.run_eval(**batch).item()
    model.lora_model.unmerge()
    with whole_parameters(model.parameters()):
        restored = all(torch.equal(it, weights[name]) for name, it in model.named_parameters())
    other = make(0)
    load_adapter(other.lora_model, adapter)
    loaded = other.run_eval(**batch).item()
    model.lora_model.reset()
    reset = model.run_eval(**batch).item()
    destroy_model_parallel()
    return adapter, before, merged, restored, loaded, reset


def test_loading_an_adapter_gathers_each_unit_once(run_ranks):
    def gathers_of(target_modules):
        lora = LoraConfig(lora_rank=2, lora_alpha=4, target_modules=target_modules)
        config = neuronx_distributed_config(optimizer_config={"zero_stage": 3}, lora_config=lora)
        model = initialize_parallel_model(config, lambda: LlamaForCausalLM(CONFIG))
        adapter = gather_adapter(model.lora_model)
        with count_traffic() as traffic:
            load_adapter(model.lora_model, adapter)
        destroy_model_parallel()
        return traffic["dp+cp"].calls

    def both():
        return gathers_of(["q_proj"]), gathers_of(["q_proj", "k_proj", "v_proj", "o_proj"])

    for few, many in run_ranks(both, 2):
        assert few == many == CONFIG.num_hidden_layers


def test_adapters_over_a_sharded_base_are_those_over_a_whole_one(run_ranks):
    results = run_ranks(lambda: [steps_of(stage) for stage in (1, 3)], 2)

    for whole, sharded in results:
        for name, tensor in whole[0].items():
            torch.testing.assert_close(sharded[0][name], tensor, rtol=1e-12, atol=1e-14)
        _, before, merged, restored, loaded, reset = sharded
        assert [before, reset] == pytest.approx([whole[1], whole[5]], rel=1e-12)
        assert [merged, loaded] == pytest.approx([before] * 2, rel=1e-12)
        assert restored
        assert reset != pytest.approx(before, rel=1e-4)
