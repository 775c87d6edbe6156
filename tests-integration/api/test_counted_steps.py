"""An optimizer that counts its steps in a Python number resumes bitwise, also with ZeRO-1 and at another layout."""

import neuronx_distributed as nxd
import pytest
import torch
from nxd_layers import ColumnParallelLinear
from torch import nn


class CountingAdam(torch.optim.Optimizer):
    """Adam without a correction of its second moment, as optimizers outside of torch are often written."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter.sub_(group["lr"] / (1 - 0.9 ** state["step"]) * state["mean"])


def train(steps, path, tp, zero1, resume=False, save=False):
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp, optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False}
    )
    torch.manual_seed(0)

    def make():
        return nn.Sequential(ColumnParallelLinear(6, 8, gather_output=True, dtype=torch.float64))

    model = nxd.initialize_parallel_model(config, make)
    optimizer = nxd.initialize_parallel_optimizer(config, CountingAdam, model.parameters())
    if resume:
        nxd.load_checkpoint(path, "t", model=model, optimizer=optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0, dtype=torch.float64).view(2, 6) / 12).square().sum().backward()
        optimizer.step()
    if save:
        nxd.save_checkpoint(path, "t", model=model, optimizer=optimizer)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero1", [False, True])
def test_run_resumes_bitwise(run_ranks, tmp_path, zero1):
    whole = run_ranks(train, 2, 5, tmp_path, 1, zero1)
    run_ranks(train, 2, 3, tmp_path, 1, zero1, False, True)
    resumed = run_ranks(train, 2, 2, tmp_path, 1, zero1, True)

    for expected, found in zip(whole, resumed, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_run_resumes_at_another_layout(run_ranks, tmp_path):
    (whole,) = run_ranks(train, 1, 5, tmp_path, 1, False)
    run_ranks(train, 2, 3, tmp_path, 1, True, False, True)
    resumed = run_ranks(train, 2, 2, tmp_path, 2, False, True)

    for name, expected in whole.items():
        torch.testing.assert_close(torch.cat([rank[name] for rank in resumed]), expected, rtol=1e-10, atol=1e-12)
