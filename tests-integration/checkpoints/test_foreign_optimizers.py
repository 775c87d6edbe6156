"""nxd-ckpt with optimizers whose states are no plain tensors: 8-bit codes with scales, local tensors, counts.

The optimizer is one of the test's own, made as torchao's 8-bit ones are: states are a tensor subclass, which a DTensor
holds where the parameter is one. What one layout saved is loaded at another and saved again, bit by bit the same.
"""

import nxd_ckpt
import pytest
import torch
import torch.distributed as dist
from test_trainers_of_torch import plain, tensor_parallel, train_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

BLOCK = 4  # elements with one scale
aten = torch.ops.aten


class Quantized(torch.Tensor):
    """float64 `[rows, columns]` as codes `uint8[rows, columns]` into a table, and a scale for each block."""

    @staticmethod
    def __new__(cls, codes, scale, table):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float64)

    def __init__(self, codes, scale, table):
        self.codes, self.scale, self.table = codes, scale, table

    def __repr__(self, **kwargs):
        return f"Quantized({list(self.shape)})"

    def __tensor_flatten__(self):
        return ["codes", "scale", "table"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        self = args[0]
        if func is aten.detach.default:
            return cls(self.codes.detach(), self.scale.detach(), self.table)
        if func is aten.view.default:
            return cls(self.codes.view(args[1]), self.scale, self.table)
        if func is aten.slice.Tensor:
            _, dim, start, end = args
            blocks = self.shape[1] // BLOCK
            assert dim == 0
            return cls(self.codes[start:end], self.scale[start * blocks : end * blocks], self.table)
        raise NotImplementedError(f"{func} of 8-bit states")

    def values(self):
        return (self.table[self.codes.long()].view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    def set_values(self, values):
        blocks = values.reshape(-1, BLOCK)
        self.scale.copy_(blocks.abs().amax(1))
        units = blocks / self.scale.clamp(min=1e-30)[:, None]
        self.codes.copy_(((units + 1) * 127).round().to(torch.uint8).view(self.shape))


class Momentum8bit(torch.optim.Optimizer):
    """Also keeps signs as a plain tensor of what this rank holds, and a count that is no tensor."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])

    def update(self, parameter, state, lr):
        local, gradient = self.local(parameter), self.local(parameter.grad)
        if not state:
            state.update(
                steps=0, signs=torch.zeros(local.shape, dtype=torch.int8), momentum=self.new_momentum(parameter)
            )
        momentum = self.local(state["momentum"])
        eight_bit = isinstance(momentum, Quantized)
        value = (momentum.values() if eight_bit else momentum) * 0.9 + gradient * 0.1
        momentum.set_values(value) if eight_bit else momentum.copy_(value)
        state["steps"] += 1
        state["signs"].copy_(value.sign())
        local.sub_(value, alpha=lr)

    def new_momentum(self, parameter):
        if parameter.ndim < 2 or parameter.shape[0] % 8:
            return torch.zeros_like(parameter)
        local = self.local(parameter)
        codes = torch.full(local.shape, 127, dtype=torch.uint8)
        table = torch.arange(256, dtype=torch.float64) / 127 - 1
        made = Quantized(codes, torch.zeros(local.numel() // BLOCK, dtype=torch.float64), table)
        if not isinstance(parameter, DTensor):
            return made
        return DTensor.from_local(
            made, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )

    @staticmethod
    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def one_process(world_size):
    return plain(world_size)


def ddp(world_size):
    return DistributedDataParallel(plain(world_size))


def fsdp(world_size):
    return fully_shard(plain(world_size), mesh=init_device_mesh("cpu", (world_size,)))


def state_of(trainer):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model = trainer(dist.get_world_size())
    return {"model": model, "optimizer": Momentum8bit(model.parameters(), lr=0.05)}


def train_and_save(trainer, folder):
    state = state_of(trainer)
    train_steps("FSDP2", state["model"], state["optimizer"], range(3))
    nxd_ckpt.save(folder, "trained", state)


def load_and_save_again(trainer, folder, tag):
    state = state_of(trainer)
    before = [group["lr"] for group in state["optimizer"].param_groups]
    nxd_ckpt.load(folder, "trained", into=state)
    assert [group["lr"] for group in state["optimizer"].param_groups] == before
    assert all(parameter.grad is None for parameter in state["model"].parameters())
    nxd_ckpt.save(folder, tag, state)
    return [states["steps"] for states in state["optimizer"].state.values()]


@pytest.mark.parametrize("writer", [fsdp, pytest.param(ddp, marks=pytest.mark.slow)])
def test_8_bit_states_of_2_ranks_load_on_1_2_and_4_bit_by_bit(run_ranks, tmp_path, writer):
    run_ranks(train_and_save, 2, writer, tmp_path)
    trained = nxd_ckpt.open_checkpoint(tmp_path, "trained")
    momentum = "optimizer.state.model.0.weight.momentum"
    assert trained.tensors[f"{momentum}.codes"].shape == (16, 8)
    assert trained.tensors[f"{momentum}.scale"].shape == (32,)
    assert trained.tensors[f"{momentum}.table"].shape == (256,)
    assert trained.read(f"{momentum}.codes").unique().numel() > 10

    for world_size, reader in ((1, one_process), (2, ddp), (2, fsdp), (4, fsdp)):
        tag = f"{reader.__name__}-{world_size}"
        assert run_ranks(load_and_save_again, world_size, reader, tmp_path, tag) == [[3] * 6] * world_size
        again = nxd_ckpt.open_checkpoint(tmp_path, tag)
        assert again.tensors == trained.tensors
        for name in trained.tensors:
            assert torch.equal(again.read(name), trained.read(name)), f"{name} in {tag}"


class Preconditioned(Momentum8bit):
    """Has a state of another shape than its parameter, of which nobody knows whether the ranks have it alike."""

    def new_momentum(self, parameter):
        self.state[parameter]["factor"] = torch.ones(3)
        return torch.zeros_like(parameter)


def error_of_saving(trainer, optimizer_class, folder):
    state = state_of(trainer)
    state["optimizer"] = optimizer_class(state["model"].parameters(), lr=0.05)
    train_steps("TP", state["model"], state["optimizer"], range(1))
    with pytest.raises(ValueError, match="optimizer") as raised:
        nxd_ckpt.save(folder, "a", state)
    return str(raised.value)


@pytest.mark.parametrize(
    ("trainer", "optimizer_class", "message"),
    [
        (
            tensor_parallel,
            Momentum8bit,
            "'optimizer.state.model.2.weight.momentum': a Quantized [8, 16] is split into [8, 8]",
        ),
        (fsdp, Preconditioned, "'optimizer.state.model.0.weight.factor' is a plain Tensor [3] for a parameter [16, 8]"),
    ],
)
def test_states_that_are_cut_in_an_unknown_way_are_refused_by_path(
    run_ranks, tmp_path, trainer, optimizer_class, message
):
    for error in run_ranks(error_of_saving, 2, trainer, optimizer_class, tmp_path):
        assert message in error
    assert nxd_ckpt.list_checkpoints(tmp_path) == []
