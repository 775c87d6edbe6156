"""Weights and ZeRO-1 states through nxd_ckpt: saved at one layout, loaded at another, and training goes on."""

import pytest
import torch
from nxd_ckpt import load, open_checkpoint, save
from nxd_engine.checkpoints.optimizer_state import allocate_optimizer_state, optimizer_state
from nxd_engine.checkpoints.state import model_state
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_optim import MASTER_KEY, NeuronZero1Optimizer
from nxd_state import active_group, all_reduce, initialize_model_parallel

pytestmark = pytest.mark.sample(3)  # each takes its time

CONFIG = LlamaConfig(
    vocab_size=22,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
STEPS = 6


def make(tp, dtype, *, save_master_weights=True):
    initialize_model_parallel(tp)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG, sequence_parallel=tp > 1, dtype=dtype)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = NeuronZero1Optimizer(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        torch.optim.AdamW,
        bucket_cap_mb_reduce_scatter=0.004,
        save_master_weights=save_master_weights,
        lr=0.05,
        fused=True,
    )
    return model, optimizer


def train(model, optimizer, steps):
    """The mean loss of each step over all replicas, which have four sequences between them."""
    replicas = active_group("dp")
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step % 2)
        tokens = torch.randint(CONFIG.vocab_size, (4, 9), generator=generator)[replicas.rank :: replicas.size]
        with optimizer.overlap_backward():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(all_reduce(loss.detach().double(), replicas, op="avg")))
    return losses


def stored_in(path):
    return {name: (info.dtype, info.global_shape) for name, info in open_checkpoint(path).tensors.items()}


def save_and_go_on(path, tp, dtype):
    model, optimizer = make(tp, dtype)
    before = train(model, optimizer, range(STEPS))
    save(path, "a", model_state(model) | optimizer_state(model, optimizer))
    return before, train(model, optimizer, range(STEPS, 2 * STEPS))


def load_save_and_go_on(path, tp, dtype):
    """Once more, so that the way back is walked too."""
    model, optimizer = make(tp, dtype)
    allocate_optimizer_state(model, optimizer, stored_in(path))
    load(path, "a", into=model_state(model) | optimizer_state(model, optimizer))
    save(path, "b", model_state(model) | optimizer_state(model, optimizer))
    return train(model, optimizer, range(STEPS, 2 * STEPS))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((4, 1), (2, 1)), ((4, 1), (1, 1)), ((2, 1), (4, 1)), ((4, 2), (4, 1)), ((1, 1), (4, 2))],
    ids=["DP 4 to 2", "DP 4 to 1", "DP 2 to 4", "TP 2 x DP 2 to DP 4", "one rank to TP 2 x DP 2"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_training_goes_on_at_another_layout_as_if_it_had_never_stopped(run_ranks, tmp_path, saved, loaded, dtype):
    tolerance = {"rel": 1e-10} if dtype == torch.float64 else {"rel": 0.05}

    results = run_ranks(save_and_go_on, saved[0], str(tmp_path), saved[1], dtype)
    resumed = run_ranks(load_save_and_go_on, loaded[0], str(tmp_path), loaded[1], dtype)

    before, expected = results[0]
    assert expected[-1] < before[0]
    for losses in resumed:
        assert losses == pytest.approx(expected, **tolerance)
    first, second = open_checkpoint(tmp_path, "a"), open_checkpoint(tmp_path, "b")
    assert first.tensors.keys() == second.tensors.keys()
    assert any(name.endswith(MASTER_KEY) for name in first.tensors) == (dtype == torch.bfloat16)
    for name in first.tensors:
        assert torch.equal(first.read(name), second.read(name)), name


@pytest.mark.parametrize("tp", [1, 2])
def test_training_goes_on_bitwise_at_the_same_layout(run_ranks, tmp_path, tp):
    results = run_ranks(save_and_go_on, 2 * tp, str(tmp_path), tp, torch.bfloat16)
    resumed = run_ranks(load_save_and_go_on, 2 * tp, str(tmp_path), tp, torch.bfloat16)

    assert resumed == [expected for _, expected in results]


def save_and_round(path, saves):
    """Save, and go on as after loading: from the parameters as they are, without what rounding has cut off."""
    model, optimizer = make(1, torch.bfloat16, save_master_weights=saves)
    train(model, optimizer, range(STEPS))
    save(path, "a", model_state(model) | optimizer_state(model, optimizer))
    optimizer.refresh_master_weights()
    return train(model, optimizer, range(STEPS, 2 * STEPS))


def load_into_other_weights(path, wants):
    model, optimizer = make(1, torch.bfloat16, save_master_weights=wants)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    optimizer.refresh_master_weights()
    allocate_optimizer_state(model, optimizer, stored_in(path))
    load(path, "a", into=model_state(model) | optimizer_state(model, optimizer), strict=False)
    return train(model, optimizer, range(STEPS, 2 * STEPS))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("saves", "wants"), [(False, False), (False, True), (True, False)], ids=["default", "not saved", "not wanted"]
)
def test_half_precision_training_goes_on_from_the_parameters_without_master_weights(run_ranks, tmp_path, saves, wants):
    expected = run_ranks(save_and_round, 2, str(tmp_path), saves)

    resumed = run_ranks(load_into_other_weights, 2, str(tmp_path), wants)

    assert resumed == expected


def train_plainly(model, optimizer, steps):
    """As `train`, with torch's own optimizer and clipping, on one process."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step % 2)
        tokens = torch.randint(CONFIG.vocab_size, (4, 9), generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load_into_a_plain_optimizer(path):
    model, sharded = make(1, torch.float64)
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in sharded.param_groups]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    allocate_optimizer_state(model, optimizer, stored_in(path))
    load(path, "a", into=model_state(model) | optimizer_state(model, optimizer))
    return train_plainly(model, optimizer, range(STEPS, 2 * STEPS))


def test_checkpoint_of_zero1_loads_into_a_plain_optimizer(run_ranks, tmp_path):
    (_, expected), *_ = run_ranks(save_and_go_on, 2, str(tmp_path), 1, torch.float64)

    (losses,) = run_ranks(load_into_a_plain_optimizer, 1, str(tmp_path))

    assert losses == pytest.approx(expected, rel=1e-10)
