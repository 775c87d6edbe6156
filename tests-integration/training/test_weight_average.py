"""The moving average of a run's weights: the same at every layout, evaluated, resumed exactly, and exported."""

import nxd_ckpt
import pytest
import torch
from nxd_ckpt.interop import open_hugging_face
from nxd_engine.checkpoints.merged_weights import average_name
from nxd_state import initialize_model_parallel
from nxd_trainer.export import export_hugging_face
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import prepare_run, train
from nxd_trainer.training.step import evaluate

DECAY = 0.7
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
ZERO1, TIED = "parallel.zero_stage=1", "model.tie_word_embeddings=true"
LAYOUTS = {
    "one": (1, []),
    "tp2-dp2-zero1": (4, [TP2, ZERO1]),
    "pp2-dp2": (4, [PP2]),
}


@pytest.fixture
def short(settings):
    more = ["train.steps=6", "train.eval_every=3", "train.gradient_accumulation_steps=2", "optimizer.warmup_steps=0"]
    return [*settings, TIED, *more, f"train.ema_decay={DECAY}"]


def start(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    return recipe


def run(settings):
    return train(start(settings)).step


def initial_weights(settings):
    state, _ = prepare_run(start(settings))
    return {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}


def resumed_held_out_loss(settings):
    state, _ = prepare_run(start(settings))
    return evaluate(state)


def at(layout, run_ranks, settings, *more, program=run):
    world, parallel = LAYOUTS[layout]
    return run_ranks(program, world, [*settings, *parallel, *more])


def tensors(folder, tag=None):
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def averages(folder, names):
    found = tensors(folder)
    return {name: found[average_name(name)] for name in names}


@pytest.fixture
def expected(run_ranks, short, tmp_path):
    """The average by hand, from the weights of every step of one process."""
    [average] = at("one", run_ranks, short, f"output={tmp_path / 'start'}", program=initial_weights)
    at("one", run_ranks, short, f"output={tmp_path / 'one'}", "checkpoint.save_every=1", "checkpoint.keep=0")
    for step in range(1, 7):
        weights = tensors(tmp_path / "one/checkpoints", f"step-{step:08d}")
        average = {name: DECAY * it + (1 - DECAY) * weights[name] for name, it in average.items()}
    return average


@pytest.mark.parametrize("layout", ["tp2-dp2-zero1", pytest.param("pp2-dp2", marks=pytest.mark.slow)])
def test_average_at_every_layout_is_the_one_by_hand_and_evaluations_use_it(
    layout, expected, run_ranks, short, tmp_path
):
    at(layout, run_ranks, short)

    for folder in ("one", "run"):
        found = averages(tmp_path / folder / "checkpoints", expected)
        for name, average in expected.items():
            torch.testing.assert_close(found[name], average, rtol=1e-9, atol=1e-10)
    weights = tensors(tmp_path / "run/checkpoints")
    assert not torch.allclose(weights["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])
    export_hugging_face(tmp_path / "run/checkpoints", tmp_path / "exported", averaged=True)
    exported = open_hugging_face(tmp_path / "exported")
    assert exported.tensors.keys() == expected.keys()
    plain = [*short, "train.ema_decay=0", f"output={tmp_path / 'plain'}"]
    plain = [*plain, f"checkpoint.initial_weights={tmp_path / 'exported'}"]
    [loss] = at("one", run_ranks, plain, program=resumed_held_out_loss)
    of_run, of_one = (read_records(tmp_path / folder / "metrics.jsonl")[-1].held_out_loss for folder in ("run", "one"))
    assert of_run == pytest.approx(of_one, rel=1e-9)
    assert of_run == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("layout", ["tp2-dp2-zero1", pytest.param("pp2-dp2", marks=pytest.mark.slow)])
def test_resumed_average_is_bitwise_that_of_the_uninterrupted_run(layout, run_ranks, short, tmp_path):
    at(layout, run_ranks, short, f"output={tmp_path / 'whole'}")

    at(layout, run_ranks, short, "train.stop_after=3")
    at(layout, run_ranks, short)

    found, expected = (tensors(tmp_path / folder / "checkpoints") for folder in ("run", "whole"))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    records = [read_records(tmp_path / folder / "metrics.jsonl") for folder in ("run", "whole")]
    assert [it.held_out_loss for it in records[0]] == [it.held_out_loss for it in records[1]]


def test_average_resumes_at_another_layout(run_ranks, short, expected, tmp_path):
    at("tp2-dp2-zero1", run_ranks, short, "train.stop_after=3")
    at("one", run_ranks, short)

    for name, average in averages(tmp_path / "run/checkpoints", expected).items():
        torch.testing.assert_close(average, expected[name], rtol=1e-8, atol=1e-9)


def test_run_that_turns_the_average_on_starts_it_from_the_weights_and_export_without_one_is_refused(
    run_ranks, short, tmp_path
):
    at("one", run_ranks, short, "train.ema_decay=0", "train.stop_after=5")
    weights = tensors(tmp_path / "run/checkpoints")
    with pytest.raises(ValueError, match="has no moving average of the weights; leave --ema out"):
        export_hugging_face(tmp_path / "run/checkpoints", tmp_path / "exported", averaged=True)

    at("one", run_ranks, short)

    after = tensors(tmp_path / "run/checkpoints")
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(after[average_name(name)], DECAY * weights[name] + (1 - DECAY) * after[name])
