"""bfloat16 weights rounded stochastically: near the run with master weights, and resumed bitwise."""

import nxd_ckpt
import pytest
import torch
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import train

TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
ZERO1 = "parallel.zero_stage=1"
ROUNDED = "optimizer.stochastic_rounding=true"
LAYOUTS = {"tp2-dp2-zero1": (4, [TP2, ZERO1]), "pp2": (2, [PP2]), "one": (1, [])}


@pytest.fixture
def short(settings):
    more = ["train.steps=20", "train.eval_every=0", "train.gradient_accumulation_steps=2", "train.dtype=bfloat16"]
    return [*settings, *more, "model.tie_word_embeddings=true", "optimizer.lr=1e-3"]


def run(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    return train(recipe).loss


def at(layout, run_ranks, settings, *more):
    world, parallel = LAYOUTS[layout]
    return run_ranks(run, world, [*settings, *parallel, *more])


def tensors(folder):
    checkpoint = nxd_ckpt.open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("layout", ["tp2-dp2-zero1", "pp2"])
def test_resumed_run_is_bitwise_the_uninterrupted_one(layout, run_ranks, short, tmp_path):
    short = [*short, ROUNDED, "train.steps=8"]
    whole = at(layout, run_ranks, short, f"output={tmp_path / 'whole'}")

    at(layout, run_ranks, short, "train.stop_after=4")
    resumed = at(layout, run_ranks, short)

    assert resumed == whole
    found, expected = tensors(tmp_path / "run/checkpoints"), tensors(tmp_path / "whole/checkpoints")
    assert found.keys() == expected.keys()
    assert not any("master_weight" in name for name in expected)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_losses_are_nearer_to_those_with_master_weights_than_rounding_to_nearest(run_ranks, short, tmp_path):
    short = [*short, "optimizer.lr=1e-4"]  # updates below the spacing of bfloat16
    runs = {"masters": [ZERO1], "nearest": [], "rounded": [ROUNDED], "layout": [TP2, ROUNDED]}
    for name, more in runs.items():
        run_ranks(run, 2 if name == "layout" else 1, [*short, *more, f"output={tmp_path / name}"])

    last = {name: read_records(tmp_path / name / "metrics.jsonl")[-1].loss for name in runs}
    assert abs(last["rounded"] - last["masters"]) < 0.5 * abs(last["nearest"] - last["masters"])
    assert last["layout"] == pytest.approx(last["rounded"], rel=2e-3)
