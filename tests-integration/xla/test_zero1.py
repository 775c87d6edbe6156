"""`NeuronZero1Optimizer` beside torch-xla's own ZeroRedundancyOptimizer, on torch-xla's device, a world of one."""

import pytest
import torch
from nxd_optim import NeuronZero1Optimizer
from torch import nn

pytestmark = [pytest.mark.xla, pytest.mark.neuron]

STEPS = 5


def make_model(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).to(device)


def groups(model):
    return [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].bias]},
    ]


def train(optimizer_type, optimizer_class, device, max_norm, defaults):
    """The weights after some steps, on the CPU, and the norm of the last gradients."""
    import torch_xla

    model = make_model(device)
    optimizer = optimizer_type(
        groups(model), optimizer_class, grad_clipping=True, max_norm=max_norm, pin_layout=False, **defaults
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(6, 7, generator=generator).to(device)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        torch_xla.sync()
    return [parameter.detach().cpu() for parameter in model.parameters()], float(optimizer.grad_norm)


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
@pytest.mark.parametrize(
    ("optimizer_class", "defaults"),
    [(torch.optim.AdamW, {"lr": 0.02}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
)
def test_zero1_equals_torch_xlas_own(optimizer_class, defaults, max_norm):
    import torch_xla
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    device = torch_xla.device()

    ours, our_norm = train(NeuronZero1Optimizer, optimizer_class, device, max_norm, defaults)
    theirs, their_norm = train(ZeroRedundancyOptimizer, optimizer_class, device, max_norm, defaults)

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert our_norm == pytest.approx(their_norm, rel=1e-4)
