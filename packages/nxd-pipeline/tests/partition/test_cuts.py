"""Where models are cut when nobody says where, and what is refused."""

from itertools import pairwise

import pytest
from nxd_pipeline.partition import check_cuts, even_cuts, layer_names
from torch import nn


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "stage_sizes"),
    [(4, 2, [2, 2]), (5, 2, [2, 3]), (7, 4, [1, 2, 2, 2]), (9, 4, [2, 2, 2, 3]), (3, 3, [1, 1, 1]), (3, 1, [3])],
)
def test_even_cuts_give_the_remainder_to_later_stages(num_layers, num_stages, stage_sizes):
    cuts = even_cuts([str(index) for index in range(num_layers)], num_stages)

    ends = [-1, *map(int, cuts), num_layers - 1]
    assert [end - start for start, end in pairwise(ends)] == stage_sizes


def test_even_cuts_with_fewer_layers_than_stages_raises():
    with pytest.raises(ValueError, match="3 layers cannot fill 4 stages"):
        even_cuts(["a", "b", "c"], 4)


def test_layer_names_of_several_classes_come_in_the_order_of_the_model():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Linear(1, 1))

    assert layer_names(model, nn.Linear) == ["0", "2"]
    assert layer_names(model, [nn.Linear, nn.Tanh]) == ["0", "1.1", "2"]
    with pytest.raises(ValueError, match="has no layers of class Conv2d"):
        layer_names(model, nn.Conv2d)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [(["0"], "names 1 layers"), (["0", "0"], "names a layer twice"), (["0", "module.1"], "did you mean '1'")],
)
def test_check_cuts_of_other_number_or_name_raises(cuts, message):
    with pytest.raises(ValueError, match=message):
        check_cuts(nn.Sequential(*(nn.Tanh() for _ in range(3))), cuts, 3)
