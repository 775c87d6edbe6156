"""Replicas and tensor-parallel ranks that start from different weights are noticed at the first step."""

import pytest
import torch
from nxd_optim import GradientReducer, NeuronZero1Optimizer
from nxd_state import initialize_model_parallel
from torch import nn


def _reducer(parameters):
    reducer, optimizer = GradientReducer(parameters), torch.optim.SGD(parameters, lr=0.1)

    def step():
        reducer.finish()
        optimizer.step()

    return step


def _zero1(parameters):
    return NeuronZero1Optimizer(parameters, torch.optim.SGD, lr=0.1).step


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("make", [_reducer, _zero1])
def test_first_step_of_ranks_that_start_differently_raises_until_they_load_one_state(run_ranks, make, tensor_parallel):
    def outcome():
        initialize_model_parallel(tensor_parallel)
        torch.manual_seed(torch.distributed.get_rank())
        model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
        step = make(list(model.parameters()))
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValueError, match=r"ranks 0 and 1 .*parameter 0 of shape \(3, 3\).*torch.manual_seed"):
            step()
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        step()
        with torch.no_grad():
            model[1].bias += torch.distributed.get_rank()  # later differences are not looked for
        model(torch.ones(1, 3)).sum().backward()
        step()

    run_ranks(outcome, 2)
