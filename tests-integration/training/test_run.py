"""What a run does and leaves behind: its updates follow the recipe, and so do its checkpoints and its metrics."""

import sys
from pathlib import Path

import nxd_ckpt
import pytest
import torch
from nxd_data.loader import TrainLoader
from nxd_state import get_world_group, initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import StepRecord, read_records
from nxd_trainer.report.run_log import count_warnings, read_events
from nxd_trainer.report.run_page import render_run_page
from nxd_trainer.training import saving, train
from nxd_trainer.training.run_state import RunState
from nxd_trainer.training.saving import describe_checkpoints

pytestmark = pytest.mark.sample(5)  # each takes its time


def run(settings: list[str]) -> None:
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    train(recipe)


@pytest.fixture
def records_of(run_ranks, settings, tmp_path):
    """`records_of(world, *more)`: the metrics of a run of five steps on `world` data-parallel ranks."""

    def make(world: int, *more: str) -> list[StepRecord]:
        folder = tmp_path / f"run-{world}-{len(list(tmp_path.iterdir()))}"
        run_ranks(run, world, [*settings, "train.steps=5", *more, f"output={folder}"])
        return read_records(folder / "metrics.jsonl")

    return make


@pytest.mark.parametrize("zero1", [False, True])
def test_run_logs_its_memory_and_messages_once(run_ranks, settings, tmp_path, zero1):
    run_ranks(run, 2, [*settings, "train.steps=5", f"parallel.zero1={str(zero1).lower()}"])

    start, memory, messages, end = read_events(tmp_path / "run")
    weights = memory["bytes"]["parameters"]
    moments = memory["bytes"]["optimizer states"]
    assert [it["event"] for it in (start, memory, messages, end)] == ["start", "memory", "messages", "end"]
    assert start["environment"]["layout"] == read_records(tmp_path / "run/metrics.jsonl")[0].layout
    assert moments == pytest.approx(weights if zero1 else 2 * weights, rel=0.01)  # of both moments, half with ZeRO-1
    assert memory["bytes"]["gradients"] >= weights
    # A ring's all-reduce among two ranks sends each gradient once; ZeRO-1 sends half of them, and half of the weights.
    assert messages["axes"]["dp+cp"]["bytes"] == pytest.approx(weights, rel=0.05)
    assert (end["how"], end["step"]) == ("finished", 5)
    assert "cannot be shown" not in render_run_page(tmp_path / "run")


def run_with_modules_of(folder: Path, settings: list[str]) -> None:
    sys.path.insert(0, str(folder))
    try:
        run(settings)
    finally:
        sys.path.remove(str(folder))


def test_warnings_from_the_preparation_of_a_run_are_in_its_log(run_ranks, settings, tmp_path):
    code = "import torch, warnings\nwarnings.warn('this optimizer is old')\nclass Old(torch.optim.SGD): pass\n"
    (tmp_path / "old_optimizer.py").write_text(code)
    run_ranks(run_with_modules_of, 2, tmp_path, [*settings, "train.steps=1", "optimizer.factory=old_optimizer:Old"])

    [old] = [it for it in count_warnings(read_events(tmp_path / "run")) if it.message == "this optimizer is old"]
    assert (old.count, old.ranks) == (2, [0, 1])


def model_of(folder, step: int) -> dict[str, torch.Tensor]:
    checkpoint = nxd_ckpt.open_checkpoint(folder / "checkpoints", f"step-{step:08d}")
    return {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(("model.", "lm_head."))}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["keep=0"], [2, 4, 6, 7]),
        (["keep=2", "background=true"], [6, 7]),
        (["keep=1", "keep_every=4", "background=true"], [4, 7]),
    ],
)
def test_run_saves_every_few_steps_and_at_its_end_and_keeps_what_the_recipe_says(
    run_ranks, settings, tmp_path, options, kept
):
    options = [f"checkpoint.{option}" for option in ["save_every=2", *options]]
    run_ranks(run, 1, [*settings, "train.steps=7", *options])

    assert [info.step for info in nxd_ckpt.list_checkpoints(tmp_path / "run/checkpoints")] == kept


def run_that_fails_on_rank_1_before_it_saves(settings: list[str]) -> str:
    state_dict = TrainLoader.state_dict

    def fail(loader: TrainLoader) -> dict[str, object]:
        if get_world_group().rank == 1:
            raise ValueError("where the data was is not known")
        return state_dict(loader)

    TrainLoader.state_dict = fail
    try:
        run(settings)
    except (ValueError, nxd_ckpt.CheckpointError) as error:
        return str(error)
    finally:
        TrainLoader.state_dict = state_dict
    return "all is well"


def test_run_that_fails_on_one_rank_before_it_saves_ends_on_the_other_at_once(run_ranks, settings):
    """Whose process goes on."""
    waiting, failed = run_ranks(run_that_fails_on_rank_1_before_it_saves, 2, [*settings, "train.steps=1"])

    assert failed == "where the data was is not known"
    assert waiting == "rank 1 of 2 ended its work: ValueError: where the data was is not known"


def run_with_a_weight_that_is_wrong_on_rank_1_after_step_3(settings: list[str]) -> None:
    check_weights = saving.check_weights

    def check_and_spoil(state: RunState) -> None:
        check_weights(state)
        if state.step == 3 and get_world_group().rank == 1:
            with torch.no_grad():
                next(iter(state.model.parameters())).view(torch.uint8).reshape(-1)[0] ^= 1

    saving.check_weights = check_and_spoil
    try:
        run(settings)
    finally:
        saving.check_weights = check_weights


@pytest.mark.parametrize(("every", "kept"), [(2, [1, 2]), (0, [1, 2, 3, 4]), (3, [1, 2, 3])])
def test_run_compares_the_ranks_weights_before_every_nth_save(run_ranks, settings, tmp_path, every, kept):
    options = ["checkpoint.save_every=1", "checkpoint.keep=0", f"checkpoint.check_replicas_every={every}"]
    arguments = [*settings, "train.steps=4", *options]

    if every:
        with pytest.raises(
            RuntimeError, match=r"differs from the copy that rank 0 wrote: the replicas are no longer equal"
        ):
            run_ranks(run_with_a_weight_that_is_wrong_on_rank_1_after_step_3, 2, arguments)
    else:
        run_ranks(run_with_a_weight_that_is_wrong_on_rank_1_after_step_3, 2, arguments)

    assert [info.step for info in nxd_ckpt.list_checkpoints(tmp_path / "run/checkpoints")] == kept


def test_run_keeps_the_checkpoint_with_the_lowest_held_out_loss(run_ranks, settings, tmp_path):
    to_diverge = ["optimizer.lr=0.3", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    options = ["checkpoint.save_every=2", "checkpoint.keep=1", "checkpoint.keep_best=1", "train.eval_every=1"]
    run_ranks(run, 1, [*settings, "train.steps=6", *to_diverge, *options])

    losses = {r.step: r.held_out_loss for r in read_records(tmp_path / "run/metrics.jsonl") if r.step % 2 == 0}
    best = min(losses, key=losses.__getitem__)
    assert best < 6  # or there would be nothing to choose from
    assert [info.step for info in nxd_ckpt.list_checkpoints(tmp_path / "run/checkpoints")] == [best, 6]


def test_summary_says_that_the_best_checkpoint_was_not_kept(run_ranks, settings, tmp_path):
    to_diverge = ["optimizer.lr=0.3", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    settings = [*settings, "train.steps=6", *to_diverge, "checkpoint.save_every=1", "checkpoint.keep=1"]
    run_ranks(run, 1, [*settings, "train.eval_every=1"])

    records = read_records(tmp_path / "run/metrics.jsonl")
    best = min(records, key=lambda it: it.held_out_loss)
    folder = tmp_path / "run/checkpoints"
    told = describe_checkpoints(load_recipe(None, settings), records)
    assert told.startswith(f"{folder}, without step {best.step}, the best: checkpoint.keep_best=1 keeps")
    assert describe_checkpoints(load_recipe(None, settings), [it for it in records if it.step == 6]) == str(folder)


def test_run_with_adapters_and_incremental_checkpoints_writes_frozen_weights_once(run_ranks, settings, tmp_path):
    adapters = ["lora.rank=2", "lora.save=both"]
    options = ["train.steps=3", "checkpoint.save_every=1", "checkpoint.keep=2", "checkpoint.incremental=true"]
    run_ranks(run, 1, [*settings, *adapters, *options])

    folder = tmp_path / "run/checkpoints"
    checkpoints = [nxd_ckpt.open_checkpoint(folder, info.tag) for info in nxd_ckpt.list_checkpoints(folder)]
    assert [checkpoint.step for checkpoint in checkpoints] == [2, 3]
    for checkpoint in checkpoints:
        all_bytes = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in checkpoint.tensors.values())
        assert sum(checkpoint.manifest.head.own_files.values()) < all_bytes / 2
        assert checkpoint.damage() == []


def test_run_writes_its_recipe(run_ranks, settings, tmp_path):
    settings = [*settings, "train.steps=1"]
    run_ranks(run, 1, settings)

    assert load_recipe(tmp_path / "run/recipe.toml") == load_recipe(None, settings)


def test_update_has_the_scheduled_rate_and_decays_matrices_only(run_ranks, settings, tmp_path):
    # Without memory of earlier gradients, AdamW moves each weight by the learning rate, up or down.
    adamw = ["betas=0,0", "eps=1e-30", "weight_decay=0.5", "min_lr_ratio=0"]
    every_step = ["train.steps=8", "checkpoint.save_every=1", "checkpoint.keep=0"]
    run_ranks(run, 1, [*settings, *(f"optimizer.{setting}" for setting in adamw), *every_step])
    records = read_records(tmp_path / "run/metrics.jsonl")

    assert [record.learning_rate for record in records[:5]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert records[-1].learning_rate < 0.005
    for record in records[1:]:
        before, after = model_of(tmp_path / "run", record.step - 1), model_of(tmp_path / "run", record.step)
        for name, weight in before.items():
            decay = 0.5 if weight.dim() > 1 else 0.0
            moved = (after[name] - weight * (1 - record.learning_rate * decay)).abs().max().item()
            assert moved == pytest.approx(record.learning_rate, rel=1e-9), name


def test_metrics_of_replicas_are_those_of_one_process(records_of):
    one, replicas = records_of(1), records_of(2)

    for name in ("loss", "grad_norm", "learning_rate", "tokens"):
        expected = [getattr(record, name) for record in one]
        assert [getattr(record, name) for record in replicas] == pytest.approx(expected, rel=1e-9)
    assert replicas[-1].tokens == 5 * 8 * 16
    assert replicas[-1].held_out_loss == pytest.approx(one[-1].held_out_loss, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["train.dtype=float64", "train.autocast=bfloat16"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_metrics_of_a_pipeline_are_those_of_one_process(records_of, schedule, precision):
    settings = ["train.gradient_accumulation_steps=4", "model.num_hidden_layers=4", "train.dtype=float32", precision]
    one = records_of(1, *settings)

    pipeline = records_of(2, *settings, "parallel.pipeline_parallel_size=2", f"pipeline.schedule={schedule}")

    tolerance = 1e-9 if precision == "train.dtype=float64" else 1e-6  # the order of sums, in float32
    for name in ("loss", "grad_norm", "held_out_loss", "tokens"):
        expected = [getattr(record, name) for record in one if record.held_out_loss is not None]
        found = [getattr(record, name) for record in pipeline if record.held_out_loss is not None]
        assert found == pytest.approx(expected, rel=tolerance), name
    assert pipeline[0].layout == "TP 1 x PP 2 x DP 1"


def test_metrics_are_logged_and_evaluated_at_their_own_rhythms(records_of):
    records = records_of(1, "train.log_every=2", "train.eval_every=3")

    assert [(r.step, r.held_out_loss is not None) for r in records] == [
        (1, False),
        (2, False),
        (3, True),
        (4, False),
        (5, True),
    ]


def test_autocast_computes_in_bfloat16_and_keeps_float32_weights(records_of, tmp_path):
    plain = records_of(1, "train.dtype=float32")
    autocast = records_of(1, "train.dtype=float32", "train.autocast=bfloat16")

    differences = [abs(a.loss - p.loss) for a, p in zip(autocast, plain, strict=True)]
    assert 1e-6 < max(differences) < 0.05
    [folder] = [file.parent for file in tmp_path.glob("*/recipe.toml") if 'autocast = "bfloat16"' in file.read_text()]
    assert {weight.dtype for weight in model_of(folder, 5).values()} == {torch.float32}
