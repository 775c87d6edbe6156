"""What is no longer referred to is freed, though parameters that live on have hooks of it."""

import gc
import weakref

import pytest
import torch
from nxd_optim import GradientReducer, NeuronZero1Optimizer
from nxd_state import destroy_model_parallel, initialize_model_parallel
from torch import nn


@pytest.fixture
def world_of_one():
    initialize_model_parallel()
    yield
    destroy_model_parallel()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: NeuronZero1Optimizer(parameters, torch.optim.SGD, lr=1.0),
        GradientReducer,
    ],
    ids=["zero1", "reducer"],
)
@pytest.mark.parametrize("parameters_live_on", [True, False])
def test_optimizer_that_nobody_refers_to_is_freed(world_of_one, make, parameters_live_on):
    parameters = [nn.Parameter(torch.ones(3))]
    optimizer = make(parameters)
    (parameters[0] * 2).sum().backward()
    freed, parameter_freed = weakref.ref(optimizer), weakref.ref(parameters[0])

    del optimizer
    if not parameters_live_on:
        parameters.clear()
    gc.collect()

    assert freed() is None
    assert (parameter_freed() is None) != parameters_live_on
