"""Pipelines on XLA: stages record different graphs, and exchange by graphs that are the same on both their ends."""

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from nxd_doctor.graphs import find_collectives, parse_hlo
from nxd_engine.models import LlamaForCausalLM
from nxd_engine.models.llama import LlamaDecoderLayer
from nxd_optim import GradientReducer, NeuronZero1Optimizer, reduce_sequence_parallel_gradients
from nxd_pipeline import NxDPPModel
from nxd_state import get_device, initialize_model_parallel, move_model_to_device, step_boundary
from nxd_testing import LogicalPiece, logical_pieces, run_on_ranks, run_on_replicas
from nxd_testing.replicas import ExecutedGraph, executed_graphs
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).parent))

from steps_on_replicas import RTOL, assert_same_tensors
from training_steps import CONFIG, MAX_NORM, batches, update

pytestmark = [pytest.mark.xla, pytest.mark.slow]

STEPS, MICROBATCHES = 3, 2


@dataclass(frozen=True)
class Layout:
    """How a pipeline is spread and played."""

    pp: int = 2
    tp: int = 1
    sequence_parallel: bool = False
    zero1: bool = False
    tied: bool = False
    schedule: str = "1f1b"
    virtual: int = 1


LAYOUTS = {
    "pp2": (2, Layout()),
    "pp2-gpipe-tied": (2, Layout(schedule="gpipe", tied=True)),
    "pp2-zb-h1": (2, Layout(schedule="zb-h1")),
    "pp2-interleaved": (2, Layout(schedule="interleaved", virtual=2)),
    "pp4": (4, Layout(pp=4)),
    "pp2-tp2-sp": (4, Layout(tp=2, sequence_parallel=True)),
    "pp2-dp2-zero1": (4, Layout(zero1=True)),
}

on_every_layout = pytest.mark.parametrize("name", LAYOUTS)


@dataclass
class Outcome:
    """On one rank: losses where the last stage is, norms, and weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: list[LogicalPiece]
    graphs: list[list[ExecutedGraph]]  # of each step


def train(layout: Layout) -> Outcome:
    initialize_model_parallel(layout.tp, layout.pp)
    torch.manual_seed(0)
    config = replace(CONFIG, num_hidden_layers=layout.pp * layout.virtual, tie_word_embeddings=layout.tied)
    model = NxDPPModel(
        LlamaForCausalLM(config, sequence_parallel=layout.sequence_parallel),
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=MICROBATCHES,
        auto_partition=True,
        input_names=["input_ids", "labels"],
        schedule=layout.schedule,
        virtual_pipeline_size=layout.virtual,
    )
    move_model_to_device(model, get_device())
    if layout.zero1:
        optimizer = reducer = NeuronZero1Optimizer(model.parameters(), AdamW, max_norm=MAX_NORM, lr=1e-2, eps=1e-5)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        reducer = GradientReducer(model.parameters())
    step_boundary()
    outcome = Outcome([], [], [], [])
    for step in range(STEPS):
        before = len(executed_graphs())
        [(ids, labels)] = batches(step, 1, get_device())
        loss = model.run_train(input_ids=ids, labels=labels)
        if isinstance(reducer, GradientReducer):
            reducer.finish()
            reduce_sequence_parallel_gradients(model.parameters())
        norm = update(model, optimizer, reducer)
        step_boundary()
        outcome.losses += [] if loss is None else [loss.item()]
        outcome.norms.append(norm.item())
        outcome.graphs.append(executed_graphs()[before:])
    outcome.weights = logical_pieces((n, p, p.detach().cpu()) for n, p in model.named_parameters())
    return outcome


@functools.cache
def on_replicas(name: str) -> list[Outcome]:
    world_size, layout = LAYOUTS[name]
    return run_on_replicas(train, world_size, layout)


@on_every_layout
def test_pipeline_on_replicas_equals_that_over_gloo(name):
    world_size, layout = LAYOUTS[name]

    over_gloo = run_on_ranks(train, world_size, layout, env={"NXD_DEVICE": "cpu"})

    for found, expected in zip(on_replicas(name), over_gloo, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=RTOL)
        assert found.norms == pytest.approx(expected.norms, rel=RTOL)
    # Adam divides by the gradient's own size, so that what is rounded there is not small in the update.
    found, expected = ([it.weights for it in outcomes] for outcomes in (on_replicas(name), over_gloo))
    assert_same_tensors(found, expected, rtol=1e-4)


@on_every_layout
def test_third_step_compiles_nothing(name):
    for outcome in on_replicas(name):
        assert not any(graph.is_new for graph in outcome.graphs[-1])


@on_every_layout
def test_what_goes_between_stages_is_a_graph_of_its_own(name):
    world_size, layout = LAYOUTS[name]
    stage_size = world_size // layout.pp

    for graph in on_replicas(name)[0].graphs[-1]:
        collectives = find_collectives(parse_hlo(graph.text), world_size=world_size)
        if any(group[0] // stage_size != group[-1] // stage_size for it in collectives for group in it.groups):
            assert len(collectives) == 1
