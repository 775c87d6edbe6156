"""States of Adafactor in checkpoints that nxd-ckpt writes alone: fused, split and sharded, they load at any layout."""

import nxd_ckpt
import pytest
import torch
from nxd_layers import ColumnParallelLinear, GQAQKVColumnParallelLinear
from nxd_optim import Adafactor, NeuronZero1Optimizer
from nxd_state import active_group, initialize_model_parallel
from torch import nn

STEPS = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(3, 8, gather_output=True, dtype=torch.float64)
        self.qkv = GQAQKVColumnParallelLinear(8, [8, 4], bias=False, gather_output=True, dtype=torch.float64)
        self.odd = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))

    def forward(self, inputs):
        return sum(it.square().sum() for it in self.qkv(self.up(inputs))) + self.odd.square().sum() * len(inputs)


class Run:
    def __init__(self, tp, zero1):
        initialize_model_parallel(tp)
        torch.manual_seed(0)
        self.model = Model()
        parameters = self.model.parameters()
        self.optimizer = (
            NeuronZero1Optimizer(parameters, Adafactor, grad_clipping=False, lr=0.1)
            if zero1
            else Adafactor(parameters, lr=0.1)
        )

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            rows = torch.randn(4, 3, generator=generator, dtype=torch.float64)
            replicas = active_group("dp")
            (self.model(rows[replicas.rank :: replicas.size]) * replicas.size).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}


def train_and_save(tp, zero1, folder, steps, tag):
    run = Run(tp, zero1)
    run.train(range(steps))
    nxd_ckpt.save(folder, tag, run.state())


def load_and_train(tp, zero1, folder):
    run = Run(tp, zero1)
    nxd_ckpt.load(folder, "saved", into=run.state())
    nxd_ckpt.save(folder, "again", run.state())
    run.train(range(STEPS, 2 * STEPS))
    nxd_ckpt.save(folder, "resumed", run.state())


def contents(folder, tag):
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 2, False), (1, 1, False)), ((4, 2, True), (2, 2, False)), ((1, 1, False), (2, 1, True))],
)
def test_states_of_one_layout_load_at_another(run_ranks, tmp_path, saved, loaded):
    (ranks, *layout), (other_ranks, *other_layout) = saved, loaded

    run_ranks(train_and_save, ranks, *layout, tmp_path, STEPS, "saved")
    run_ranks(load_and_train, other_ranks, *other_layout, tmp_path)
    run_ranks(train_and_save, 1, 1, False, tmp_path, 2 * STEPS, "at once")

    torch.testing.assert_close(contents(tmp_path, "again"), contents(tmp_path, "saved"), rtol=0, atol=0)
    torch.testing.assert_close(contents(tmp_path, "resumed"), contents(tmp_path, "at once"), rtol=1e-10, atol=1e-12)
    shapes = {name: tuple(it.shape) for name, it in contents(tmp_path, "saved").items()}
    names = [name for name in shapes if name.endswith("q_proj.weight.row_var")]
    assert [shapes[name] for name in names] == [(8, 1)], shapes
