"""Training steps on XLA with N ranks: the graphs that a device would get, run with XLA's own collectives."""

import functools
import math
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from nxd_state.testing import assemble_logical, run_on_ranks, run_on_replicas
from nxd_state.testing.replicas import executed_graphs
from nxd_state.xla_inspect import find_collectives, parse_hlo

sys.path.insert(0, str(Path(__file__).parent))

from training_steps import Layout, Outcome, least_bytes, train

pytestmark = [pytest.mark.xla, pytest.mark.slow]

RTOL, STEPS = 1e-5, 4
LAYOUTS = {
    "tp2": (2, Layout(tp=2)),
    "tp2-sp": (2, Layout(tp=2, sequence_parallel=True)),
    "tp4": (4, Layout(tp=4)),
    "tp4-sp": (4, Layout(tp=4, sequence_parallel=True)),
    "dp2": (2, Layout(tp=1)),
    "dp2-zero1": (2, Layout(tp=1, zero1=True)),
    "tp2-dp2": (4, Layout(tp=2)),
    "tp2-dp2-sp": (4, Layout(tp=2, sequence_parallel=True, accumulation=2)),
    "tp2-dp2-zero1": (4, Layout(tp=2, zero1=True)),
    "tp2-dp2-sp-zero1": (4, Layout(tp=2, sequence_parallel=True, zero1=True, accumulation=2)),
}
TOKEN = "f32[]"  # torch-xla chains a graph's collectives by a number that each all-reduce takes along

on_every_layout = pytest.mark.parametrize("name", LAYOUTS)


def train_and_look(layout: Layout, steps: int) -> tuple[Outcome, list[bool], str]:
    """What `train` gives; of the graph of each step, whether it was compiled for it; and the last one's text."""
    outcome = train(layout, steps)
    graphs = executed_graphs()[-steps:]
    return outcome, [graph.is_new for graph in graphs], graphs[-1].text


@functools.cache
def on_replicas(name: str) -> list[tuple[Outcome, list[bool], str]]:
    world_size, layout = LAYOUTS[name]
    return run_on_replicas(train_and_look, world_size, layout, STEPS)


def assert_same_tensors(found, expected, *, rtol: float) -> None:
    """Elements near zero are compared to their tensor's scale; nothing must be missing."""
    wholes, wanted = (assemble_logical(pieces, rtol=1e-4) for pieces in (found, expected))
    assert wholes.keys() == wanted.keys()
    for name, tensor in wanted.items():
        atol = rtol * tensor.abs().max().item()
        torch.testing.assert_close(wholes[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@on_every_layout
def test_steps_on_replicas_equal_those_over_gloo(name):
    world_size, layout = LAYOUTS[name]

    over_gloo = run_on_ranks(train, world_size, layout, STEPS, env={"NXD_DEVICE": "cpu"})
    on_xla = [outcome for outcome, _, _ in on_replicas(name)]

    for found, expected in zip(on_xla, over_gloo, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=RTOL)
        assert found.norms == pytest.approx(expected.norms, rel=RTOL)
    assert_same_tensors([it.gradients for it in on_xla], [it.gradients for it in over_gloo], rtol=RTOL)
    # Adam divides by the gradient's own size, so that what is rounded in a small gradient is not small in the update.
    assert_same_tensors([it.weights for it in on_xla], [it.weights for it in over_gloo], rtol=1e-4)


@on_every_layout
def test_each_step_is_one_graph_and_the_second_is_the_last_to_be_compiled(name):
    for _, is_new, _ in on_replicas(name):
        # The optimizer makes its state in the first step, which the second finds.
        assert is_new == [True, True, *[False] * (STEPS - 2)]


@on_every_layout
def test_step_sends_the_least_bytes(name):
    world_size, layout = LAYOUTS[name]
    [(_, _, text), *_] = on_replicas(name)

    collectives = find_collectives(parse_hlo(text), world_size=world_size)

    tokens = sum(
        Fraction(2 * 4 * (it.group_size - 1), it.group_size) for it in collectives if it.shapes[-1:] == (TOKEN,)
    )
    assert sum(it.step_bytes for it in collectives) - math.ceil(tokens) == least_bytes(layout, world_size)


def test_twenty_steps_with_accumulation_and_schedule_compile_nothing_after_the_second():
    layout = Layout(tp=2, sequence_parallel=True, accumulation=2)

    for _, is_new, _ in run_on_replicas(train_and_look, 2, layout, 20):
        assert is_new == [True, True, *[False] * 18]
