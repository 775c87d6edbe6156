"""What `sharded_state()` of an optimizer and of a moving average returns, given to nxd-ckpt without their owners."""

import nxd_ckpt
import pytest
import torch
from nxd_layers import ColumnParallelLinear
from nxd_optim import NeuronZero1Optimizer, WeightAverage
from nxd_state import active_group, initialize_model_parallel
from torch import nn

FEATURES, STEPS = 6, 2


class Uneven(nn.Module):
    """Sizes that no number of replicas divides, and a scale of one element, which one replica alone owns."""

    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(3, FEATURES, gather_output=True, dtype=torch.float64)
        self.odd = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs):
        return self.up(inputs).square().sum() * self.scale + self.odd.square().sum() * len(inputs)


class Run:
    def __init__(self, tp):
        initialize_model_parallel(tp)
        torch.manual_seed(0)
        self.model = Uneven()
        self.optimizer = NeuronZero1Optimizer(self.model.parameters(), torch.optim.AdamW, grad_clipping=False, lr=0.1)
        self.of_all = WeightAverage(self.model.parameters(), 0.5)
        self.of_scale = WeightAverage([self.model.scale], 0.5)  # other replicas have an empty list

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            rows = torch.randn(4, 3, generator=generator, dtype=torch.float64)
            replicas = active_group("dp")
            (self.model(rows[replicas.rank :: replicas.size]) * replicas.size).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.of_all.update()
            self.of_scale.update()

    def state(self):
        return {
            "model": self.model,
            "moments": self.optimizer.sharded_state(),
            "averages": {"all": self.of_all.sharded_state(), "scale": self.of_scale.sharded_state()},
        }


def stored_keys(model, folder):
    """What `allocate_state` asks for: types and shapes of the states of a parameter in the checkpoint."""
    tensors, names = nxd_ckpt.open_checkpoint(folder, "saved").tensors, {id(p): n for n, p in model.named_parameters()}
    return lambda parameter: {
        key: (info.dtype, info.global_shape)
        for key in ("step", "exp_avg", "exp_avg_sq")
        for info in [tensors[f"moments.state.model.{names[id(parameter)]}.{key}"]]
    }


def train_and_save(tp, folder):
    run = Run(tp)
    run.train(range(STEPS))
    nxd_ckpt.save(folder, "saved", run.state())


def load_and_train(tp, folder):
    run = Run(tp)
    run.optimizer.allocate_state(stored_keys(run.model, folder))
    nxd_ckpt.load(folder, "saved", into=run.state())
    nxd_ckpt.save(folder, "again", run.state())
    run.optimizer.finish_loading({})
    run.train(range(STEPS, 2 * STEPS))
    nxd_ckpt.save(folder, "resumed", run.state())


def train_at_once(folder):
    run = Run(1)
    run.train(range(2 * STEPS))
    nxd_ckpt.save(folder, "at once", run.state())


def contents(folder, tag):
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize(("saved", "loaded"), [((2, 4), (1, 1)), ((1, 1), (1, 3))])
def test_lists_of_states_of_which_some_ranks_have_none_load_at_another_layout(run_ranks, tmp_path, saved, loaded):
    (tp, ranks), (other_tp, other_ranks) = saved, loaded

    run_ranks(train_and_save, ranks, tp, tmp_path)
    run_ranks(load_and_train, other_ranks, other_tp, tmp_path)
    run_ranks(train_at_once, 1, tmp_path)

    torch.testing.assert_close(contents(tmp_path, "again"), contents(tmp_path, "saved"), rtol=0, atol=0)
    torch.testing.assert_close(contents(tmp_path, "resumed"), contents(tmp_path, "at once"), rtol=1e-10, atol=1e-12)
    assert "averages.scale.state.model.scale.weight_average" in contents(tmp_path, "saved")
