"""Balanced cuts are the best there are, and costs are counted where they are."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nxd_pipeline.partition import PartitionOptions, balanced_cuts, layer_flops, partition_model
from torch import nn


def stage_costs(costs, cuts):
    bounds = [0, *(int(cut) + 1 for cut in cuts), len(costs)]
    return [sum(costs[start:end]) for start, end in itertools.pairwise(bounds)]


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=8), num_stages=st.integers(1, 5))
def test_no_cuts_have_a_cheaper_largest_stage(costs, num_stages):
    names = [str(index) for index in range(len(costs))]
    if len(costs) < num_stages:
        with pytest.raises(ValueError, match="cannot fill"):
            balanced_cuts(names, costs, num_stages)
        return

    cuts = balanced_cuts(names, costs, num_stages)

    assert len(cuts) == num_stages - 1
    every = itertools.combinations(names[:-1], num_stages - 1)
    assert max(stage_costs(costs, cuts)) == min(max(stage_costs(costs, other)) for other in every)


def test_costs_around_the_layers_count_for_the_first_and_the_last_stage():
    assert balanced_cuts("abcd", [3, 1, 1, 1, 1, 0], 2) == ["a"]
    assert balanced_cuts("abcd", [0, 1, 1, 1, 1, 3], 2) == ["c"]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, 2], "has 2 costs, but the model has 4 layers"),
        ([1, 1, 1, -1], "negative"),
        ([1, 1, 1, float("nan")], "non-fin"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        balanced_cuts("abcd", costs, 2)


class Block(nn.Linear):
    pass


class Model(nn.Module):
    """Layers of 16 parameters, an embedding as large as three of them, a head as large as two."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.layers = nn.ModuleList(Block(4, 4, bias=False) for _ in range(7))
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.parametrize(
    ("balance", "sizes"),
    [
        ("layers", [2, 2, 3]),
        ("parameters", [1, 4, 2]),
        ("flops", [3, 3, 1]),
        ([9, 1, 1, 1, 1, 1, 1], [1, 3, 3]),
        ([0, 1, 1, 1, 1, 1, 1, 1, 5], [3, 3, 1]),
    ],
)
def test_auto_partition_spreads_layers_by_balance(balance, sizes):
    options = PartitionOptions(Block, auto_partition=True, balance=balance)

    stages = partition_model(Model(), 3, options).stages

    layers = [sum(isinstance(module, Block) for _, module in stage.named_modules()) for stage in stages]
    assert layers == sizes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"balance": "time"}, "unknown balance='time'"),
        ({"auto_partition": False, "balance": "flops"}, "pass auto_"),
    ],
)
def test_balance_that_says_nothing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition_model(Model(), 3, PartitionOptions(Block, **{"auto_partition": True, **arguments}))


def test_layer_flops_are_those_of_the_matrices_and_nothing_is_computed():
    with torch.device("meta"):
        model = Model()

    flops = layer_flops(model, [f"layers.{index}" for index in range(7)], tokens=torch.zeros(2, 3, dtype=torch.long))

    tokens = 6
    assert flops == [0.0, *[2.0 * 16 * tokens] * 7, 2.0 * 32 * tokens]
