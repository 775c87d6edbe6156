"""Parameter groups by weight decay, and states given to an optimizer in the dtype in which it keeps them."""

import pytest
import torch
from nxd_optim import give_states, parameter_groups
from torch import nn


def model():
    layers = nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(6, 4),
            "proj": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "head": nn.Linear(4, 6, bias=False),
        }
    )
    layers["head"].weight = layers["embed_tokens"].weight
    return layers


def names(module, group):
    return {name for name, parameter in module.named_parameters() if any(parameter is p for p in group["params"])}


def test_parameter_groups_decay_matrices_only():
    module = model()

    decayed, plain = parameter_groups(module, 0.1)

    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert names(module, decayed) == {"embed_tokens.weight", "proj.weight"}
    assert names(module, plain) == {"proj.bias", "norm.weight", "norm.bias"}


def test_parameter_groups_no_decay_exempts_a_module_by_name():
    module = model()

    decayed, plain = parameter_groups(module, 0.1, no_decay=("embed_tokens",))

    assert names(module, decayed) == {"proj.weight"}
    assert len(plain["params"]) == 4


def test_parameter_groups_leave_out_frozen_parameters_and_empty_groups():
    module = nn.Linear(2, 2)
    module.bias.requires_grad = False

    groups = parameter_groups(module, 0.1)

    assert [len(group["params"]) for group in groups] == [1]


def test_parameter_groups_are_what_an_optimizer_takes():
    optimizer = torch.optim.AdamW(parameter_groups(model(), 0.1), lr=0.5)

    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [(0.1, 0.5), (0.0, 0.5)]


def test_parameter_groups_unknown_name_raises_with_the_nearest():
    with pytest.raises(ValueError, match=r"no_decay='embed_token' .* did you mean 'embed_tokens'"):
        parameter_groups(model(), 0.1, no_decay=("embed_token",))


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
