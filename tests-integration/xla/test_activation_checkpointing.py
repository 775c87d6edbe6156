"""Activation checkpointing on torch-xla's device: what is computed again has the random numbers of the first time."""

import pytest
import torch
from nxd_layers import apply_activation_checkpointing
from nxd_state import (
    destroy_model_parallel,
    get_device,
    initialize_model_parallel,
    rng_stream,
    seed_model_parallel,
    step_boundary,
)
from torch import Tensor, nn

pytestmark = [pytest.mark.xla, pytest.mark.neuron]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.relu(self.up(x)), 0.5)
        with rng_stream("tp"):
            return nn.functional.dropout(self.down(hidden), 0.25)


@pytest.fixture
def model():
    initialize_model_parallel(tensor_model_parallel_size=1)
    torch.manual_seed(0)
    yield nn.Sequential(Block(), Block()).to(get_device())
    destroy_model_parallel()


def gradients(model: nn.Module, *, autocast: bool = False, seed: int = 1) -> list[Tensor]:
    model.zero_grad()
    seed_model_parallel(seed)
    inputs = torch.linspace(-1.0, 1.0, 32).view(8, 4).to(get_device())
    step_boundary()
    with torch.autocast("xla", dtype=torch.bfloat16, enabled=autocast):
        loss = model(inputs).square().sum()
    loss.backward()
    step_boundary()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_without_it(model, autocast):
    plain = gradients(model, autocast=autocast)

    apply_activation_checkpointing(model, [Block])

    assert [torch.equal(*pair) for pair in zip(gradients(model, autocast=autocast), plain, strict=True)] == [True] * 8


def test_step_is_one_graph_which_another_seed_does_not_change(model):
    from torch_xla.debug import metrics

    apply_activation_checkpointing(model, [Block])
    first = gradients(model)
    compiled = metrics.counter_value("UncachedCompile")

    other = gradients(model, seed=2)

    assert metrics.counter_value("UncachedCompile") == compiled
    assert not torch.equal(first[0], other[0])
