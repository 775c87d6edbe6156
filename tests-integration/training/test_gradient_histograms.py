"""Histograms of gradients in TensorBoard: of all stages, and those of one process at every layout."""

import pytest
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import train

pytest.importorskip("tensorboard")

LAYOUTS = {
    "tp2-dp2-zero1": (4, ["parallel.tensor_parallel_size=2", "parallel.zero_stage=1"]),
    "pp2": (2, ["parallel.pipeline_parallel_size=2"]),
}


def run(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    return train(recipe).step


def histograms(folder):
    """(step, counts) of each parameter, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    return {
        tag: [(event.step, list(event.histogram_value.bucket)) for event in events.Histograms(tag)]
        for tag in events.Tags()["histograms"]
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_histograms_at_every_layout_are_those_of_one_process(layout, run_ranks, settings, tmp_path):
    world, parallel = LAYOUTS[layout]
    settings = [*settings, "train.steps=5", "train.eval_every=0", "train.gradient_accumulation_steps=2"]
    settings = [
        *settings,
        "train.gradient_histograms_every=2",
        "train.max_grad_norm=0",
    ]  # ZeRO-1 reports before clipping
    run_ranks(run, 1, [*settings, f"output={tmp_path / 'one'}"])

    run_ranks(run, world, [*settings, *parallel, "train.stop_after=3"])
    run_ranks(run, world, [*settings, *parallel])

    found, expected = histograms(tmp_path / "run"), histograms(tmp_path / "one")
    assert found.keys() == expected.keys()
    for name, of_steps in expected.items():
        assert [step for step, _ in found[name]] == [2, 4]
        for (_, counts), (_, wanted) in zip(found[name], of_steps, strict=True):
            assert sum(counts) == sum(wanted)
            moved = sum(abs(a - b) for a, b in zip(counts, wanted, strict=True)) / 2
            assert moved <= 0.001 * sum(wanted) + 1  # rounding moves an element over a border
