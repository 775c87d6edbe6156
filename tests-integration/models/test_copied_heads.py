"""Fewer key-value heads than tensor-parallel ranks: the copies of a head count once, stay equal and are saved once."""

import copy
import dataclasses

import nxd_ckpt
import pytest
import torch
from nxd_engine.checkpoints.optimizer_state import allocate_optimizer_state, optimizer_state
from nxd_engine.checkpoints.state import model_state
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_optim import grad_norm
from nxd_state import get_group, initialize_model_parallel
from nxd_testing import assemble_logical, logical_pieces

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=24,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=12,
    num_key_value_heads=6,  # on four ranks: three expanded heads each, two copies of some on one rank
    initializer_range=0.3,
)
TOKENS = torch.arange(2 * 9).view(2, 9) * 5 % 24


ONE_HEAD = dataclasses.replace(CONFIG, num_key_value_heads=1)  # as many copies as ranks


def make_model(tp: int, config: LlamaConfig = CONFIG) -> LlamaForCausalLM:
    initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(0)
    return LlamaForCausalLM(config, dtype=torch.float64)


def train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_gradient_norm_counts_each_head_once(run_ranks, norm_type):
    def norm(tp):
        model = make_model(tp)
        model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        return grad_norm(model.parameters(), norm_type)

    [expected] = run_ranks(norm, 1, 1)

    for found in run_ranks(norm, 4, 4):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_copies_are_bitwise_equal_after_training(run_ranks):
    def weights():
        model = make_model(4)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 5)
        return logical_pieces((name, p, p) for name, p in model.named_parameters() if "qkv_proj" in name)

    assemble_logical(run_ranks(weights, 4), rtol=0)  # raises where ranks disagree


def test_copies_cost_one_all_reduce_per_layer(run_ranks):
    def all_reduces():
        model = make_model(4)
        with torch.profiler.profile() as profile:
            model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        return sum(event.name == "c10d::allreduce_" for event in profile.events())

    layers = CONFIG.num_hidden_layers
    over_gloo = {"NXD_SHM": "0"}  # collectives through shared memory are no operations of torch to be counted
    assert run_ranks(all_reduces, 4, env=over_gloo) == [1 + 2 * layers + 2 * layers + 1 + 2 + layers] * 4


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("config", "saved_at", "loaded_at"),
    [
        pytest.param(CONFIG, 4, 1, id="2 to 1"),
        pytest.param(CONFIG, 1, 4, id="1 to 2"),
        pytest.param(CONFIG, 4, 2, id="2 to 1 on two ranks"),
        pytest.param(ONE_HEAD, 2, 1, id="2 to 1 of one head"),
        pytest.param(ONE_HEAD, 2, 4, id="2 to 4 of one head"),
    ],
)
def test_checkpoint_saved_at_one_kv_multiplier_goes_on_at_another(run_ranks, tmp_path, config, saved_at, loaded_at):
    def save():
        model = make_model(saved_at, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, 2)
        state = {**model_state(model), **optimizer_state(model, optimizer)}
        nxd_ckpt.save(tmp_path, "2", state)
        return sorted(state), train(model, optimizer, 2)

    def load():
        model = make_model(loaded_at, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpoint = nxd_ckpt.open_checkpoint(tmp_path)
        stored = {
            name: (checkpoint.read(name).dtype, tuple(checkpoint.read(name).shape)) for name in checkpoint.tensors
        }
        allocate_optimizer_state(model, optimizer, stored)
        nxd_ckpt.load(tmp_path, "2", into={**model_state(model), **optimizer_state(model, optimizer)})
        return train(model, optimizer, 2)

    (names, expected), *_ = run_ranks(save, saved_at)
    [found, *_] = run_ranks(load, loaded_at)

    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert not [name for name in names if "qkv" in name]


def test_copied_heads_that_lost_their_metadata_are_refused(run_ranks):
    def check():
        model = copy.deepcopy(make_model(4))
        with pytest.raises(ValueError, match="is split over 4 ranks but has lost its shard metadata"):
            model_state(model)
        return get_group("tp").size

    assert run_ranks(check, 4) == [4] * 4
