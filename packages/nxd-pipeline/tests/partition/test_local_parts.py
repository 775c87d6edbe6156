"""A rank's part of a model answers to the whole model's names, and takes the whole model's state."""

import pytest
import torch
from nxd_pipeline.partition import LocalParts, manual_partition
from torch import nn


class Part(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return self.inner(x)


def make_parts():
    """A rank with the first and third of three stages, whose first and last layer share a weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[3].weight = model[0].weight
    stages = manual_partition(
        [Part(model[0], model[1]), Part(model[2]), Part(model[3])], input_names=["x"], model=model
    )
    return model, LocalParts([stages[0], stages[2]])


def test_names_are_those_of_the_model_and_tied_weights_come_once():
    model, local = make_parts()

    assert [name for name, _ in local.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias", "3.bias"]
    assert [name for name, _ in local.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert local.state_dict().keys() == {name for name in model.state_dict() if not name.startswith("2")}
    assert local.tied_names() == {"3.weight": "0.weight"}


def test_state_of_the_whole_model_loads_and_other_states_are_refused():
    _, local = make_parts()
    whole, _ = make_parts()

    local.load_state_dict(whole.state_dict(), strict=True)

    for name, value in local.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])
    with pytest.raises(ValueError, match=r"the state has no \['0.bias'"):
        local.load_state_dict({"0.weight": torch.zeros(2, 2)}, strict=True)
    local.load_state_dict({"0.weight": torch.zeros(2, 2)}, strict=False)
    assert not local.state_dict()["3.weight"].any()
    with pytest.raises(ValueError, match=r"'1.bias' has shape \(2,\) here but \(3,\) in the state"):
        local.load_state_dict({"1.bias": torch.zeros(3)}, strict=False)
