"""States are given to an optimizer in the dtype in which it keeps them."""

import pytest
import torch
from nxd_optim import give_states
from torch import nn


def test_states_take_on_the_parameters_dtype_and_settings_stay():
    parameter, other = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": [parameter], "lr": 0.25}, {"params": [other]}])
    optimizer.state[other]["step"] = torch.tensor(4.0)
    wide = torch.tensor([1.0, 2.0])

    give_states(optimizer, {parameter: {"step": torch.tensor(9.0), "exp_avg": wide, "exp_avg_sq": wide}})

    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["exp_avg"].tolist() == [1.0, 2.0]
    assert (state["step"].dtype, state["step"].item()) == (torch.float32, 9.0)
    assert not optimizer.state.get(other)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_states_of_another_class_are_refused():
    parameter = nn.Parameter(torch.ones(2))

    with pytest.raises(ValueError, match=r"AdamW has a state 'step', but the given states are \['momentum_buffer'\]"):
        give_states(torch.optim.AdamW([parameter]), {parameter: {"momentum_buffer": torch.ones(2)}})
