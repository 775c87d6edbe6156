"""Steps on XLA of layers whose parts differ from rank to rank: all ranks record one graph, and compute as over gloo."""

import functools
import sys
from pathlib import Path

import pytest
from nxd_testing import run_on_ranks, run_on_replicas

sys.path.insert(0, str(Path(__file__).parent))

from layer_models import NAMES, make_model
from steps_on_replicas import assert_same_outcomes, train_and_look
from training_steps import Layout, train

pytestmark = [pytest.mark.xla, pytest.mark.slow]

STEPS = 3
LAYOUTS = {"tp2": (2, Layout(tp=2)), "tp2-dp2-zero1": (4, Layout(tp=2, zero1=True))}


def make(name: str, layout: Layout):
    return make_model(name)


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_on_replicas_are_one_graph_and_equal_those_over_gloo(name, layout_name):
    world_size, layout = LAYOUTS[layout_name]
    model = functools.partial(make, name)

    over_gloo = run_on_ranks(train, world_size, layout, STEPS, model, env={"NXD_DEVICE": "cpu"})
    on_xla = run_on_replicas(train_and_look, world_size, layout, STEPS, model)  # ranks whose graphs differ raise

    assert_same_outcomes([outcome for outcome, _, _ in on_xla], over_gloo)
    for _, is_new, _ in on_xla:
        assert is_new == [True, True, False]  # the second finds the optimizer's state
