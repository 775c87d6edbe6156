"""Stages written by hand: how they are wired, and the names of their parameters."""

import pytest
from nxd_pipeline.partition import Stage, Wiring, manual_partition
from torch import nn


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.part = model[0]

    def forward(self, x):
        return self.part(x)


class Last(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.layers = nn.ModuleList([model[1], nn.Tanh()])

    def forward(self, hidden, y, factor=2):
        return self.layers[1](self.layers[0](hidden)) * y * factor


def test_modules_form_a_chain_that_takes_inputs_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    stages = manual_partition([First(model), Last(model)], input_names=["x", "y"], model=model)

    wiring = Wiring(stages)
    assert [(edge.producer, edge.consumer) for edge in wiring.edges] == [(0, 1)]
    assert wiring.model_inputs == {"x", "y"}
    assert [name for stage in stages for name, _ in stage.named_parameters()] == list(model.state_dict())
    assert {"1", "layers.1"} <= {name for name, _ in stages[1].named_modules()}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([First([nn.Tanh()]), Stage(nn.Tanh(), ("x",))], "1 of 2 stages are of class Stage"),
        ([First([nn.Tanh()]), Last([nn.Tanh(), nn.Tanh()])], "takes 'y', which is not one of the inputs"),
    ],
)
def test_stages_that_do_not_fit_raise(stages, message):
    with pytest.raises(ValueError, match=message):
        manual_partition(stages, input_names=["x"])


def test_parameter_of_the_model_that_no_stage_has_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    with pytest.raises(ValueError, match=r"no stage has the parameters \['2.weight', '2.bias'\] of the model"):
        manual_partition([First(model), Last(model)], input_names=["x", "y"], model=model)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([(("x",), ("a",)), (("a",), ("a",)), (("a",), ())], "'a' is an output of stages 0 and 1"),
        ([(("b",), ("a",)), (("a",), ("b",)), (("a",), ())], "stage 0 uses value 'b' of stage 1"),
        ([(("x",), ("a",)), (("a",), ("b",))], "the last stage names outputs"),
    ],
)
def test_wiring_without_one_earlier_maker_for_each_value_raises(names, message):
    with pytest.raises(ValueError, match=message):
        Wiring([Stage(nn.Tanh(), inputs, outputs) for inputs, outputs in names])
