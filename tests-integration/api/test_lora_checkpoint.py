"""LoRA through the config, `save_checkpoint` and `load_checkpoint`: three modes, pipelines, ZeRO-1, any degrees."""

import json

import nxd_ckpt
import pytest
import torch
from neuronx_distributed.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from nxd_engine.models import LlamaForCausalLM
from nxd_lora import LoraConfig, gather_adapter
from resumable_llama import config_of, train

pytestmark = pytest.mark.sample(1)  # each takes its time

MODES = {
    "adapter": {"save_lora_config_adapter": False},
    "both": {"save_lora_base": True},
    "merged": {"save_lora_base": True, "merge_lora": True},
}
TARGETS = ["embed_tokens", "q_proj", "v_proj", "down_proj", "lm_head"]
SAVED_AT = (2, 2, True)
LAYOUTS = [(4, 1, False), (1, 2, True)]
FACTORS = {
    f"model.layers.{layer}.{name}.lora_{factor}"
    for layer in range(4)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    for factor in "AB"
}
FACTORS |= {f"model.embed_tokens.lora_embedding_{factor}" for factor in "AB"} | {"lm_head.lora_A", "lm_head.lora_B"}


def lora_config(**settings):
    return LoraConfig(lora_rank=2, lora_alpha=4, target_modules=TARGETS, **settings)


@pytest.fixture
def build(make_config):
    """`build(tp, pp, zero1, lora=..., seed=...)`: model, optimizer and scheduler of the documented API."""

    def make(tp, pp, zero1, *, lora, seed=0):
        config = config_of(tp, pp, optimizer_config={"zero_one_enabled": zero1}, lora_config=lora)
        torch.manual_seed(seed)
        model = initialize_parallel_model(config, lambda: LlamaForCausalLM(make_config(), dtype=torch.float64))
        optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.05)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    return make


def save_in_every_mode(build, root):
    """Of each mode, the losses after its save."""
    losses = {}
    for mode, settings in MODES.items():
        model, optimizer, scheduler = build(*SAVED_AT, lora=lora_config(**settings))
        train(model, optimizer, scheduler, range(2))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_checkpoint(f"{root}/{mode}", "a", model, optimizer, scheduler, async_save=mode == "merged")
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        losses[mode] = train(model, optimizer, scheduler, range(2, 4))
    return losses


def resume(build, root, mode, layout):
    """Losses after loading into a model whose base, where the checkpoint has it, and trained adapter were others."""
    seed = 0 if mode == "adapter" else 1
    parts = build(*layout, lora=lora_config(init_lora_weights="gaussian"), seed=seed)
    train(*parts, range(5, 6))
    load_checkpoint(f"{root}/{mode}", None, *parts)
    return train(*parts, range(2, 4))


def resume_everywhere(build, root, layouts):
    return {(mode, layout): resume(build, root, mode, layout) for mode in MODES for layout in layouts}


def test_every_mode_resumes_at_any_layout(run_ranks, build, tmp_path):
    root = str(tmp_path)
    expected = run_ranks(lambda: save_in_every_mode(build, root), 4)[0]

    assert expected["adapter"] == expected["both"] == expected["merged"]  # the mode has no part in the training
    of_ranks = run_ranks(lambda: resume_everywhere(build, root, LAYOUTS), 4)
    of_ranks += run_ranks(lambda: resume_everywhere(build, root, [(1, 1, False)]), 1)
    for losses in of_ranks:
        for (mode, layout), found in losses.items():
            compared = 1 if mode == "merged" else 2  # a merged adapter has ended, and a new one goes on
            assert found[:compared] == pytest.approx(expected[mode][:compared], rel=1e-10), (mode, layout)
    check_contents(tmp_path)


def check_contents(root):
    base = {name for name in nxd_ckpt.open_checkpoint(root / "both").tensors if "/" not in name} - FACTORS
    for mode, weights in (("adapter", FACTORS), ("both", base | FACTORS), ("merged", base)):
        names = nxd_ckpt.open_checkpoint(root / mode).tensors
        assert {name for name in names if "/" not in name} == weights
        states = {name.split("/")[1] for name in names if "/" in name}
        assert states == (set() if mode == "merged" else FACTORS)
    description = json.loads((root / "adapter" / "a" / "lora_adapter" / "adapter_config.json").read_text())
    assert (description["r"], description["target_modules"]) == (2, sorted(TARGETS))
    assert not (root / "both" / "a" / "lora_adapter").exists()


def take_from_checkpoint(build, root):
    """Adapters gathered from a pipeline that took them, and all that describes them, from a checkpoint."""
    found = {}
    for mode in ("adapter", "both"):
        lora = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=f"{root}/{mode}", lora_load_tag="a")
        model, *_ = build(1, 2, False, lora=lora, seed=0 if mode == "adapter" else 1)
        assert model.lora_model.lora_config.lora_rank == 2
        assert all(("lora" in name) == p.requires_grad for name, p in model.named_parameters())
        tokens = torch.arange(36).view(4, 9)
        loss = model.run_eval(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        found[mode] = (float(loss), gather_adapter(model.lora_model))
    return found


def save_trained(build, root):
    for mode in ("adapter", "both"):
        model, optimizer, scheduler = build(2, 1, False, lora=lora_config(**MODES[mode]))
        train(model, optimizer, scheduler, range(2))
        save_checkpoint(f"{root}/{mode}", "a", model, optimizer)
    tokens = torch.arange(36).view(4, 9)
    return float(model.run_eval(tokens[:, :-1], tokens[:, 1:])), gather_adapter(model.lora_model)


def test_config_takes_adapters_from_a_checkpoint_into_a_pipeline(run_ranks, build, tmp_path):
    loss, adapter = run_ranks(lambda: save_trained(build, str(tmp_path)), 2)[0]

    for of_rank in run_ranks(lambda: take_from_checkpoint(build, str(tmp_path)), 2):
        for found_loss, found in of_rank.values():
            assert found_loss == pytest.approx(loss, rel=1e-10)
            assert found.keys() == adapter.keys() == FACTORS
            for name in found:
                assert torch.equal(found[name], adapter[name])


def train_with_one_adapted_stage(build, root, layer):
    """Losses of a run whose other stage has nothing to train, and after loading what it saved."""
    lora = LoraConfig(lora_rank=2, target_modules=[f"layers.{layer}.mlp"])
    found = []
    for zero1 in (False, True):
        parts = build(1, 2, zero1, lora=lora)
        losses = train(*parts, range(2))
        save_checkpoint(root, f"{layer}-{zero1}", *parts)
        losses += train(*parts, range(2, 3))
        parts = build(1, 2, zero1, lora=lora)
        load_checkpoint(root, f"{layer}-{zero1}", *parts)
        found.append((losses, train(*parts, range(2, 3))))
    return found


def test_stage_without_adapters_takes_part(run_ranks, build, tmp_path):
    for layer in (0, 3):
        lora = LoraConfig(lora_rank=2, target_modules=[f"layers.{layer}.mlp"])

        of_ranks = run_ranks(train_with_one_adapted_stage, 4, build, str(tmp_path), layer)

        expected = run_ranks(lambda lora=lora: train(*build(1, 1, False, lora=lora), range(3)), 1)[0]
        for losses, resumed in (result for of_rank in of_ranks for result in of_rank):
            assert losses == pytest.approx(expected, rel=1e-10)
            assert resumed == losses[2:]
