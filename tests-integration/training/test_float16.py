"""Runs in float16 with a scaled loss: the same steps are skipped at every layout, and the scale resumes exactly."""

import math

import nxd_ckpt
import pytest
import torch
from nxd_state import get_world_group, initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import StopRequest, TrainingDiverged, prepare_run, run_training

TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
ZERO1 = "parallel.zero_stage=1"
LAYOUTS = {
    "one": (1, []),
    "tp2-dp2": (4, [TP2]),
    "tp2-dp2-zero1": (4, [TP2, ZERO1]),
    "pp2": (2, [PP2]),
    "pp2-dp2-zero1": (4, [PP2, ZERO1]),
}
AUTOCAST = ["train.dtype=float32", "train.autocast=float16"]
OVERFLOW_AT = 3  # on one rank alone


def run(settings, overflows=(OVERFLOW_AT,), scale=None):
    """Run a recipe whose loss scale grows every two steps; in some steps the last rank's gradients overflow."""
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    state, resumed = prepare_run(recipe)
    scaler, world = state.optimizer.loss_scaler, get_world_group()
    scaler.growth_interval = 2
    scaler.scale_factor = scaler.scale_factor if scale is None else scale
    parameters = list(state.model.parameters())

    def overflow(gradient):
        return gradient * math.inf if state.step + 1 in overflows else gradient

    if world.rank == world.size - 1:
        parameters[-1].register_hook(overflow)
    with StopRequest() as stop:
        run_training(state, resumed, stop)
    return scaler.scale_factor, scaler.skipped_steps


def run_without_overflow(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel()
    with StopRequest() as stop:
        return run_training(*prepare_run(recipe), stop).loss


def run_that_always_overflows(settings):
    with pytest.raises(TrainingDiverged, match=r"not finite even at a loss scale of .* lower optimizer.lr"):
        run(settings, overflows=range(100), scale=2.0**-23)


@pytest.fixture
def short(settings):
    more = ["train.steps=8", "train.eval_every=4", "train.gradient_accumulation_steps=2", "optimizer.warmup_steps=0"]
    return [*settings, *more, *AUTOCAST, "optimizer.lr=1e-3"]


def at(layout, run_ranks, settings, *more, program=run):
    world, parallel = LAYOUTS[layout]
    return run_ranks(program, world, [*settings, *parallel, *more])


def records(folder):
    return read_records(folder / "metrics.jsonl")


def tensors(folder):
    checkpoint = nxd_ckpt.open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize(
    "layout",
    ["tp2-dp2", "tp2-dp2-zero1", *(pytest.param(it, marks=pytest.mark.slow) for it in ("pp2", "pp2-dp2-zero1"))],
)
def test_every_layout_skips_the_step_that_overflows_on_one_rank_and_scales_alike(layout, run_ranks, short, tmp_path):
    [expected] = at("one", run_ranks, short, f"output={tmp_path / 'one'}")

    found = at(layout, run_ranks, short)

    assert set(found) == {expected} == {(2.0**18, 1)}
    of_run, of_one = records(tmp_path / "run"), records(tmp_path / "one")
    assert [it.loss_scale for it in of_run] == [it.loss_scale for it in of_one]
    assert [it.skipped_steps for it in of_run] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [it.loss for it in of_run] == pytest.approx([it.loss for it in of_one], rel=2e-3)


def test_losses_are_nearly_those_of_float32(run_ranks, short, tmp_path):
    at("one", run_ranks, short, program=run_without_overflow)
    at("one", run_ranks, short, "train.autocast=none", f"output={tmp_path / 'float32'}", program=run_without_overflow)

    in_float16, in_float32 = records(tmp_path / "run"), records(tmp_path / "float32")
    assert in_float16[-1].skipped_steps == 0
    assert [it.grad_norm for it in in_float16] == pytest.approx([it.grad_norm for it in in_float32], rel=2e-2)
    assert [it.loss for it in in_float16] == pytest.approx([it.loss for it in in_float32], rel=2e-3)


def test_run_whose_gradients_are_never_finite_ends_with_an_error(run_ranks, short):
    at("tp2-dp2", run_ranks, short, program=run_that_always_overflows)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("tp2-dp2-zero1", "weights"),
        ("pp2", "autocast"),
        pytest.param("tp2-dp2-zero1", "autocast", marks=pytest.mark.slow),
        pytest.param("pp2-dp2-zero1", "weights", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_is_bitwise_the_uninterrupted_one_also_after_a_skipped_step(
    layout, dtype, run_ranks, short, tmp_path
):
    if dtype == "weights":
        short = [*short, "train.dtype=float16", "train.autocast=none"]
    whole = at(layout, run_ranks, short, f"output={tmp_path / 'whole'}")

    at(layout, run_ranks, short, "train.stop_after=5")
    resumed = at(layout, run_ranks, short)

    assert resumed == whole
    found, expected = tensors(tmp_path / "run/checkpoints"), tensors(tmp_path / "whole/checkpoints")
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
