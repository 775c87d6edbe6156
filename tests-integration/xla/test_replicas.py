"""Training steps on XLA with N ranks: the graphs that a device would get, run with XLA's own collectives."""

import functools
import sys
from pathlib import Path

import pytest
from nxd_testing import run_on_ranks, run_on_replicas

sys.path.insert(0, str(Path(__file__).parent))

from step_bytes import least_bytes, sent_bytes
from steps_on_replicas import assert_same_outcomes, train_and_look
from training_steps import LAYOUTS, Layout, Outcome, train

pytestmark = [pytest.mark.xla, pytest.mark.slow]

STEPS = 4
on_every_layout = pytest.mark.parametrize("name", LAYOUTS)


@functools.cache
def on_replicas(name: str) -> list[tuple[Outcome, list[bool], str]]:
    world_size, layout = LAYOUTS[name]
    return run_on_replicas(train_and_look, world_size, layout, STEPS)


@on_every_layout
def test_steps_on_replicas_equal_those_over_gloo(name):
    world_size, layout = LAYOUTS[name]

    over_gloo = run_on_ranks(train, world_size, layout, STEPS, env={"NXD_DEVICE": "cpu"})
    on_xla = [outcome for outcome, _, _ in on_replicas(name)]

    assert_same_outcomes(on_xla, over_gloo)


@on_every_layout
def test_each_step_is_one_graph_and_the_second_is_the_last_to_be_compiled(name):
    for _, is_new, _ in on_replicas(name):
        # The optimizer makes its state in the first step, which the second finds.
        assert is_new == [True, True, *[False] * (STEPS - 2)]


@on_every_layout
def test_step_sends_the_least_bytes(name):
    world_size, layout = LAYOUTS[name]
    [(_, _, text), *_] = on_replicas(name)

    assert sent_bytes(text, world_size) == least_bytes(layout, world_size)


def test_twenty_steps_with_accumulation_and_schedule_compile_nothing_after_the_second():
    layout = Layout(tp=2, sequence_parallel=True, accumulation=2)

    for _, is_new, _ in run_on_replicas(train_and_look, 2, layout, 20):
        assert is_new == [True, True, *[False] * 18]
