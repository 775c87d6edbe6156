"""What optimizers with a joint step have in common: copies, and states of other optimizers."""

import copy

import pytest
import torch
from nxd_optim import Adafactor, Muon
from torch import nn


@pytest.mark.parametrize("optimizer_class", [Adafactor, Muon])
def test_copy_keeps_training_alike(optimizer_class):
    first = nn.Parameter(torch.ones(4, 3))
    optimizer = optimizer_class([first], lr=0.1)
    first.grad = torch.eye(4, 3)
    optimizer.step()

    second_optimizer = copy.deepcopy(optimizer)

    second = second_optimizer.param_groups[0]["params"][0]
    second.grad = first.grad.clone()
    optimizer.step()
    second_optimizer.step()
    assert torch.equal(first, second)


@pytest.mark.parametrize(("optimizer_class", "state"), [(Adafactor, "row_var"), (Muon, "momentum_buffer")])
def test_states_of_another_optimizer_are_refused(optimizer_class, state):
    parameter = nn.Parameter(torch.ones(4, 3))
    other = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(4, 3)
    other.step()

    with pytest.raises(KeyError, match=state):
        optimizer_class([parameter]).load_state_dict(other.state_dict())


@pytest.mark.parametrize("optimizer_class", [Adafactor, Muon])
def test_groups_added_later_are_updated(optimizer_class):
    first, second = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    optimizer = optimizer_class([first], lr=0.1)
    first.grad = torch.eye(4, 3)
    optimizer.step()

    optimizer.add_param_group({"params": [second]})

    second.grad = torch.eye(4, 3)
    first.grad = None
    optimizer.step()
    assert torch.equal(first, second)
