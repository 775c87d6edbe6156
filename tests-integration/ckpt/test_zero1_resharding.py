"""Weights and ZeRO-1 states through nxd_ckpt: saved at one layout, loaded at another, and training goes on."""

import pytest
import torch
from nxd_ckpt import Shard, ShardedTensor, load, open_checkpoint, save
from nxd_optim.zero1 import MASTER_KEY, NeuronZero1Optimizer
from nxd_state import active_group, all_reduce, initialize_model_parallel
from nxd_trainer.checkpoint import OPTIMIZER_PREFIX, logical_name, model_state
from nxd_trainer.models import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=22,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
STEPS = 6


def make(tp, dtype):
    initialize_model_parallel(tp)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG, sequence_parallel=tp > 1, dtype=dtype)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = NeuronZero1Optimizer(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        torch.optim.AdamW,
        bucket_cap_mb_reduce_scatter=0.004,
        save_master_weights=True,
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


def optimizer_state(model, optimizer):
    """The optimizer's states by the names of the unsharded model, for nxd_ckpt."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shards, state = {}, {}
    for entry in optimizer.sharded_state():
        parameter_name = names[id(entry.parameter)]
        if entry.scalar is not None:
            state[f"{OPTIMIZER_PREFIX}{parameter_name}/{entry.key}"] = entry.scalar
        for shard in entry.shards:
            name = f"{OPTIMIZER_PREFIX}{logical_name(parameter_name, shard.name)}/{entry.key}"
            shards.setdefault((name, shard.logical_shape), []).append(Shard(shard.tensor, shard.box.offset))
    return state | {name: ShardedTensor(shape, found) for (name, shape), found in shards.items()}


def allocate(model, optimizer, path):
    """Room for the states in the checkpoint."""
    tensors = open_checkpoint(path).tensors
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    elementwise = {"exp_avg", "exp_avg_sq"}
    dtypes = {
        name.rpartition("/")[2]: info.dtype for name, info in tensors.items() if name.startswith(OPTIMIZER_PREFIX)
    }

    def stored(parameter):
        assert f"{OPTIMIZER_PREFIX}{names[id(parameter)]}/step" in tensors
        return {key: (dtype, (1,) if key in elementwise else ()) for key, dtype in dtypes.items() if key != MASTER_KEY}

    optimizer.allocate_state(stored)


def save_and_go_on(path, tp, dtype):
    model, optimizer = make(tp, dtype)
    before = train(model, optimizer, range(STEPS))
    save(path, "a", model_state(model) | optimizer_state(model, optimizer))
    return before, train(model, optimizer, range(STEPS, 2 * STEPS))


def load_save_and_go_on(path, tp, dtype):
    """Once more, so that the way back is walked too."""
    model, optimizer = make(tp, dtype)
    allocate(model, optimizer, path)
    load(path, "a", into=model_state(model) | optimizer_state(model, optimizer))
    save(path, "b", model_state(model) | optimizer_state(model, optimizer))
    return train(model, optimizer, range(STEPS, 2 * STEPS))


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
