"""Optimizers and schedules of a recipe: at every layout that is not refused, a run is that of one process, and resumes.

The one process itself is compared with plain torch in `test_losses_of_models`; here the optimizers are torch's own.
"""

import pytest
import torch
from nxd_state import initialize_model_parallel
from nxd_trainer.lr_schedule import lr_multiplier
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import train
from optimizer_parity import losses

pytestmark = pytest.mark.sample(5)  # each takes its time

TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
ZERO1 = "parallel.zero_stage=1"
LAYOUTS = {
    "TP 2": (2, [TP2]),
    "PP 2": (2, [PP2, "train.gradient_accumulation_steps=2"]),
    "DP 2": (2, []),
    "DP 2 + ZeRO-1": (2, [ZERO1]),
    "TP 2 x DP 2 + ZeRO-1": (4, [TP2, ZERO1]),
    "DP 2 + ZeRO-2": (2, ["parallel.zero_stage=2"]),
    "DP 2 + ZeRO-3": (2, ["parallel.zero_stage=3"]),
    "DP 2 + ZeRO-1 on the host": (2, [ZERO1, "parallel.zero_offload=optimizer"]),
}
SGD = ["optimizer.type=sgd", "optimizer.config.momentum=0.9", "optimizer.lr=0.1"]
ADAFACTOR = ["optimizer.type=adafactor", "optimizer.config.d=1.5"]
OF_TRANSFORMERS = ["optimizer.factory=transformers:Adafactor", "optimizer.config.relative_step=false"]
OTHER = ["optimizer.factory=torch.optim:RAdam", "optimizer.config.betas=[0.8,0.9]"]
OPTIMIZERS = {
    "sgd": SGD,
    "adafactor": ADAFACTOR,
    "Adafactor of transformers": OF_TRANSFORMERS,
    "Adafactor of torch": ["optimizer.factory=torch.optim:Adafactor"],
    "RAdam": OTHER,
}
EXACT = {
    "sgd": LAYOUTS,
    "RAdam": LAYOUTS,
    "adafactor": [it for it in LAYOUTS if "host" not in it],
    "Adafactor of transformers": ("PP 2", "DP 2"),
}
QUICK = [("sgd", "DP 2 + ZeRO-1"), ("adafactor", "TP 2 x DP 2 + ZeRO-1")]


@pytest.fixture
def short(settings):
    return [*settings, "train.steps=4", "train.eval_every=0", "optimizer.warmup_steps=0"]


def run(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    return train(recipe).step


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        pytest.param(it, layout, marks=[] if (it, layout) in QUICK else pytest.mark.slow)
        for it, layouts in EXACT.items()
        for layout in layouts
    ],
)
def test_losses_of_a_layout_are_those_of_one_process(run_ranks, short, tmp_path, optimizer, layout):
    ranks, degrees = LAYOUTS[layout]
    short += OPTIMIZERS[optimizer]

    run_ranks(run, 1, [*short, f"output={tmp_path / 'one'}"])
    run_ranks(run, ranks, [*short, *degrees])

    expected = losses(tmp_path / "one")
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-10, abs=0)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(
    ("optimizer", "layout", "reason"),
    [
        ("Adafactor of transformers", "TP 2", r"optimizer\.factory=transformers:Adafactor: Adafactor "),
        pytest.param(
            "adafactor",
            "DP 2 + ZeRO-1 on the host",
            r"optimizer\.type=adafactor computes with whole matrices on the device; set parallel\.zero_offload=none",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Adafactor of torch",
            "DP 2 + ZeRO-1",
            r"optimizer\.factory=torch\.optim:Adafactor: Adafactor is not elementwise.*zero_stage=0, or use",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Adafactor of torch",
            "TP 2",
            r"optimizer\.factory=torch\.optim:Adafactor: Adafactor is not elementwise.*tensor_parallel_size=1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_optimizer_that_looks_at_whole_matrices_is_refused_where_ranks_hold_parts(
    run_ranks, short, optimizer, layout, reason
):
    ranks, degrees = LAYOUTS[layout]

    with pytest.raises(RuntimeError, match=reason):
        run_ranks(run, ranks, [*short, *OPTIMIZERS[optimizer], *degrees])


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("adafactor", "TP 2 x DP 2 + ZeRO-1"),
        pytest.param("adafactor", "TP 2", marks=pytest.mark.slow),
        pytest.param("adafactor", "DP 2 + ZeRO-3", marks=pytest.mark.slow),
        pytest.param("sgd", "DP 2 + ZeRO-1", marks=pytest.mark.slow),
        pytest.param("Adafactor of transformers", "PP 2", marks=pytest.mark.slow),
        pytest.param("RAdam", "TP 2 x DP 2 + ZeRO-1", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_has_the_losses_of_the_run_that_never_stopped(run_ranks, short, tmp_path, optimizer, layout):
    ranks, degrees = LAYOUTS[layout]
    short += [*OPTIMIZERS[optimizer], *degrees]
    run_ranks(run, ranks, [*short, f"output={tmp_path / 'whole'}"])

    run_ranks(run, ranks, [*short, "train.stop_after=2"])
    run_ranks(run, ranks, short)

    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_checkpoint_of_another_optimizer_is_refused(run_ranks, short):
    run_ranks(run, 1, [*short, "train.stop_after=1"])

    with pytest.raises(RuntimeError, match=r"optimizer\.type is sgd, the checkpoint has adamw"):
        run_ranks(run, 1, [*short, *SGD])


@pytest.mark.parametrize("layout", ["TP 2", pytest.param("DP 2 + ZeRO-1", marks=pytest.mark.slow)])
def test_selective_checkpointing_changes_no_loss(run_ranks, short, tmp_path, layout):
    ranks, degrees = LAYOUTS[layout]

    run_ranks(run, ranks, [*short, *degrees, f"output={tmp_path / 'plain'}"])
    run_ranks(run, ranks, [*short, *degrees, "parallel.activation_checkpointing=selective"])

    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_run_whose_held_out_loss_no_longer_falls_ends_early_and_stays_ended(run_ranks, settings, tmp_path):
    settings += ["train.steps=12", "train.eval_every=2", "train.early_stopping_patience=2", "optimizer.lr=1e-9"]
    settings += ["train.early_stopping_threshold=0.1", "optimizer.schedule=constant"]

    first = run_ranks(run, 2, [*settings, "train.stop_after=3"])  # one evaluation of the schedule, and one at the end
    then = run_ranks(run, 2, settings)
    again = run_ranks(run, 2, settings)

    assert (first, then, again) == ([3, 3], [6, 6], [6, 6])
    assert [it.step for it in read_records(tmp_path / "run/metrics.jsonl") if it.held_out_loss] == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("schedule", "ours", "arguments"),
    [
        ("cosine_with_restarts", {"num_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"power": 2.0}, {"power": 2.0, "lr_end": 1e-12}),
        ("inverse_sqrt", {}, {}),
        ("cosine", {}, {}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 7, "min_lr_ratio": 0.1},
            {"decay_type": "linear", "min_lr_ratio": 0.1},
        ),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 7, "decay_type": "1-sqrt"},
            {"decay_type": "1-sqrt"},
        ),
    ],
)
def test_learning_rates_after_the_warm_up_are_those_of_transformers(schedule, ours, arguments):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    if schedule == "warmup_stable_decay":
        arguments = {**arguments, "num_decay_steps": 7}
    theirs = transformers.get_scheduler(
        schedule, optimizer, num_warmup_steps=4, num_training_steps=30, scheduler_specific_kwargs=arguments
    )

    expected = [theirs.lr_lambdas[0](step) for step in range(4, 31)]

    found = [lr_multiplier(step, total_steps=30, warmup_steps=4, schedule=schedule, **ours) for step in range(4, 31)]
    assert found == pytest.approx(expected, abs=1e-9)
