"""nxd-ckpt in trainers that know nothing of this project: DDP, FSDP2, DTensor parallelism, and both together.

A training that goes on from a checkpoint is compared with the one process that never stopped.
"""

import nxd_ckpt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.sample(3)  # each takes its time

STEPS = 3
BATCH = 8
TP_PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def plain(world_size):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 5)).double()


def ddp(world_size):
    return DistributedDataParallel(plain(world_size))


def fsdp(world_size):
    model = plain(world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(world_size):
    return parallelize_module(plain(world_size), init_device_mesh("cpu", (world_size,)), TP_PLAN)


def fsdp_and_tensor_parallel(world_size):
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(plain(world_size), mesh["tp"], TP_PLAN), mesh=mesh["dp"])


TRAINERS = {
    "plain": plain,
    "DDP": ddp,
    "FSDP2": fsdp,
    "TP": tensor_parallel,
    "FSDP2 x TP": fsdp_and_tensor_parallel,
}
SPLITS_BATCH = ("DDP", "FSDP2")


def train_steps(trainer, model, optimizer, steps):
    group = dist.group.WORLD if dist.is_initialized() else None
    world = group.size() if group else 1
    parts = world if trainer in SPLITS_BATCH else world // 2 if trainer == "FSDP2 x TP" else 1
    rank = (group.rank() if group else 0) // (world // parts)
    for step in steps:
        torch.manual_seed(step)
        inputs = torch.randn(BATCH, 8, dtype=torch.float64).chunk(parts)[rank]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def made(trainer, world_size):
    model = TRAINERS[trainer](world_size)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def write(trainer, folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model, optimizer = made(trainer, dist.get_world_size())
    train_steps(trainer, model, optimizer, range(STEPS))
    nxd_ckpt.save(folder, "step-3", {"model": model, "optimizer": optimizer, "step": STEPS})


def resume(trainer, folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model, optimizer = made(trainer, dist.get_world_size())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    nxd_ckpt.load(folder, into=state)
    train_steps(trainer, model, optimizer, range(state["step"], 2 * STEPS))
    return [whole(parameter) for parameter in model.parameters()]


@pytest.fixture(scope="module")
def undisturbed():
    model, optimizer = made("plain", 1)
    train_steps("plain", model, optimizer, range(2 * STEPS))
    return [whole(parameter) for parameter in model.parameters()]


PAIRS = [
    ("FSDP2", 2, "plain", 1),
    ("FSDP2", 2, "FSDP2 x TP", 4),
    ("plain", 1, "TP", 2),
    ("DDP", 2, "FSDP2", 4),
    ("TP", 2, "DDP", 2),
    ("FSDP2 x TP", 4, "FSDP2", 2),
    ("FSDP2 x TP", 4, "TP", 4),
]
QUICK = [PAIRS[0], PAIRS[5]]


@pytest.mark.parametrize(
    ("writer", "writers", "reader", "readers"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS],
)
def test_training_goes_on_in_another_trainer(run_ranks, tmp_path, undisturbed, writer, writers, reader, readers):
    run_ranks(write, writers, writer, tmp_path)

    of_ranks = run_ranks(resume, readers, reader, tmp_path)

    for parameters in of_ranks:
        for found, expected in zip(parameters, undisturbed, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Lion(torch.optim.Optimizer):
    """A foreign optimizer, whose states have names, shapes and kinds of their own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["steps_taken"] = torch.zeros((), dtype=torch.int64)
                    state["momentum"] = torch.zeros_like(parameter)
                state["steps_taken"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.sub_(state["momentum"].sign(), alpha=group["lr"])


OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Lion": Lion}


def state_of(trainer, optimizer_kind):
    """What a user writes besides the two calls."""
    model = TRAINERS[trainer](dist.get_world_size())
    optimizer = OPTIMIZERS[optimizer_kind](model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer}


def whole_tensors(state):
    model, optimizer = state["model"], state["optimizer"]
    parts = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            parts[f"{name}.{key}"] = value
    return {name.replace("module.", ""): whole(value) for name, value in parts.items()}


def save_state(trainer, kind, folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    state = state_of(trainer, kind)
    train_steps(trainer, state["model"], state["optimizer"], range(STEPS))
    nxd_ckpt.save(folder, "t", state)
    return whole_tensors(state)


def load_state(trainers, kind, folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    found = {}
    for trainer in trainers:
        state = state_of(trainer, kind)
        nxd_ckpt.load(folder, into=state)
        found[trainer] = whole_tensors(state)
    return found


def readers_at(world_size):
    return [name for name in TRAINERS if world_size % 2 == 0 or name in ("plain", "DDP", "FSDP2")]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "writer", [pytest.param(name, marks=() if name == "FSDP2 x TP" else pytest.mark.slow) for name in TRAINERS]
)
def test_every_trainer_loads_what_any_other_saved_bit_by_bit_on_1_2_and_4_ranks(run_ranks, tmp_path, writer, kind):
    saved = run_ranks(save_state, 2, writer, kind, tmp_path)[0]
    assert len(saved) == 6 + 6 * {"AdamW": 3, "Lion": 2}[kind]

    for world_size in (1, 2, 4):
        readers = readers_at(world_size)
        for of_rank in run_ranks(load_state, world_size, readers, kind, tmp_path):
            for reader in readers:
                assert of_rank[reader].keys() == saved.keys()
                for name, tensor in saved.items():
                    assert torch.equal(of_rank[reader][name], tensor), f"{name} in {reader} on {world_size}"


def boxes_of_uneven_shards(folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = torch.arange(35.0).reshape(7, 5)
    cut = {
        "both": [ShardPlacement(0), ShardPlacement(1)],
        "twice": [ShardPlacement(0), ShardPlacement(0)],
        "last": [Replicate(), ShardPlacement(-1)],
        "none": [Replicate(), Replicate()],
    }
    state = {name: distribute_tensor(tensor, mesh, placements) for name, placements in cut.items()}
    nxd_ckpt.save(folder, "a", state)
    empty = {name: torch.zeros_like(it) for name, it in state.items()}
    nxd_ckpt.load(folder, into=empty)
    return all(torch.equal(it.to_local(), state[name].to_local()) for name, it in empty.items())


def test_shards_of_any_placement_and_size_are_boxes(run_ranks, tmp_path):
    assert run_ranks(boxes_of_uneven_shards, 4, tmp_path) == [True] * 4

    checkpoint = nxd_ckpt.open_checkpoint(tmp_path)
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.read(name), torch.arange(35.0).reshape(7, 5))


def refusal_of_a_sum_over_ranks(folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    mesh = init_device_mesh("cpu", (2,))
    gradient = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="sum over ranks") as error:
        nxd_ckpt.save(folder, "t", {"weight": torch.ones(3), "gradients": {"weight": gradient}})
    return str(error.value)


def test_sum_over_ranks_is_refused_by_its_path_on_every_rank(run_ranks, tmp_path):
    for told in run_ranks(refusal_of_a_sum_over_ranks, 2, tmp_path):
        assert "'gradients.weight': a DTensor with (Partial(sum),)" in told
        assert "redistribute it to Replicate()" in told

    assert nxd_ckpt.list_checkpoints(tmp_path) == []


def zero_of(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)


def write_with_zero(folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model = ddp(2)
    optimizer = zero_of(model)
    train_steps("DDP", model, optimizer, range(STEPS))
    nxd_ckpt.save(folder, "step-3", {"model": model, "optimizer": optimizer, "step": STEPS})


def resume_with_zero(folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model = ddp(4)
    optimizer = zero_of(model)
    nxd_ckpt.load(folder, into={"model": model, "optimizer": optimizer, "step": 0})
    train_steps("DDP", model, optimizer, range(STEPS, 2 * STEPS))
    return [whole(parameter) for parameter in model.parameters()]


def test_states_of_zero_redundancy_optimizer_load_at_any_number_of_ranks(run_ranks, tmp_path, undisturbed):
    run_ranks(write_with_zero, 2, tmp_path)

    for parameters in [*run_ranks(resume_with_zero, 4, tmp_path), *run_ranks(resume, 1, "plain", tmp_path)]:
        for found, expected in zip(parameters, undisturbed, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def refusal_of_flat_parameters(folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model = FullyShardedDataParallel(plain(2), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'model': .* is FullyShardedDataParallel, .* use fully_shard \(FSDP2\)"):
        nxd_ckpt.save(folder, "t", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_flat_parameters_are_refused_by_path(run_ranks, tmp_path):
    run_ranks(refusal_of_flat_parameters, 2, tmp_path)


def wide_state(model):
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}


def step_of_wide(state):
    state["model"](torch.ones(4, 1024, dtype=torch.float64)).square().mean().backward()
    state["optimizer"].step()


def train_on_while_it_is_copied(folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1024, dtype=torch.float64)  # so large that the call does not copy it
    state = wide_state(fully_shard(layer, mesh=init_device_mesh("cpu", (2,))))
    step_of_wide(state)
    saved = whole_tensors(state)
    handle = nxd_ckpt.async_save(folder, "t", state, copy_in_background=True)
    step_of_wide(state)
    handle.wait()
    nxd_ckpt.end_async_saves()
    assert not torch.equal(whole_tensors(state)["model.weight"], saved["model.weight"])
    return saved


def test_fsdp2_trains_on_while_a_save_copies_what_it_had(run_ranks, tmp_path):
    saved = run_ranks(train_on_while_it_is_copied, 2, tmp_path)[0]

    state = wide_state(nn.Linear(1024, 1024, dtype=torch.float64))
    nxd_ckpt.load(tmp_path, into=state)
    found = whole_tensors(state)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
