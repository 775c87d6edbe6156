"""Adapters with values that are not zero, the same at every layout, and gradients as the optimizer will see them."""

import pytest
import torch
from nxd_layers.lora import gather_adapter, load_adapter
from nxd_state import all_reduce, get_group


def _fill(model):
    generator = torch.Generator().manual_seed(5)
    whole = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        for name, tensor in sorted(gather_adapter(model).items())
    }
    load_adapter(model, whole)
    return whole


@pytest.fixture
def fill_adapter():
    """`fill_adapter(model)`: gives the adapter random values; returns them whole, by logical name."""
    return _fill


def _complete_grad(parameter):
    if getattr(parameter, "sequence_parallel_enabled", False):
        return all_reduce(parameter.grad, get_group("tp"))
    return parameter.grad


@pytest.fixture
def complete_grad():
    """`complete_grad(parameter)`: this rank's gradient; partial ones, which are marked, are summed over the ranks."""
    return _complete_grad
