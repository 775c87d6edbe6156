"""Stopping and going on gives the run that never stopped: bitwise at the same layout, within rounding at another."""

import resource
import shutil

import nxd_ckpt
import pytest
import torch
from nxd_state import get_rng_state, initialize_model_parallel, rng_stream
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import StopRequest, prepare_run, run_training

pytestmark = pytest.mark.sample(6)  # each takes its time

SP, PP2 = "parallel.sequence_parallel=true", "parallel.pipeline_parallel_size=2"
ZERO1, FULL = "parallel.zero_stage=1", "parallel.activation_checkpointing=full"
TP2, TIED = "parallel.tensor_parallel_size=2", "model.tie_word_embeddings=true"
LAYOUTS = {
    "one": (1, []),
    "dp2": (2, []),
    "tp2": (2, [TP2]),
    "tp2-sp": (2, [TP2, SP]),
    "tp2-dp2": (4, [TP2]),
    "pp2": (2, [PP2]),
    "tp2-sp-pp2": (4, [TP2, SP, PP2]),
    "dp2-zero1": (2, [ZERO1]),
    "tp2-sp-dp2-zero1-full": (4, [TP2, SP, ZERO1, FULL]),
    "pp2-dp2-zero1-full": (4, [PP2, ZERO1, FULL]),
}


def run(settings: list[str]) -> tuple[float, dict[str, dict[str, torch.Tensor]], list[int]]:
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    state, resumed = prepare_run(recipe)
    consumed = [state.train_loader.samples_consumed]
    with StopRequest() as stop:
        result = run_training(state, resumed, stop)
    return result.loss, get_rng_state(), [*consumed, state.train_loader.samples_consumed]


def draw(settings: list[str]) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, torch.Tensor]]]:
    """A run that uses random numbers, as dropout would: the streams' states as it finds and as it leaves them."""
    recipe = load_recipe(None, settings)
    initialize_model_parallel(recipe.parallel.tensor_parallel_size, recipe.parallel.pipeline_parallel_size)
    state, resumed = prepare_run(recipe)
    found = get_rng_state()
    torch.rand(3)
    with rng_stream("tp"):
        torch.rand(5)
    with StopRequest() as stop:
        run_training(state, resumed, stop)
    return found, get_rng_state()


def at(layout: str, run_ranks, settings: list[str], *more: str, program=run):
    world, parallel = LAYOUTS[layout]
    return run_ranks(program, world, [*settings, *parallel, *more])


def tensors(folder, tag: str | None = None) -> dict[str, torch.Tensor]:
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


# Each layout with one of the two quickly, with the other one in the slow session.
SAME_LAYOUT = [
    pytest.param(layout, more, id=f"{layout}-{name}", marks=[pytest.mark.slow] * ((index + number) % 2))
    for index, layout in enumerate(LAYOUTS)
    for number, (name, more) in enumerate(
        [("", []), ("tied-accumulating", [TIED, "train.gradient_accumulation_steps=2"])]
    )
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "more"), SAME_LAYOUT)
def test_resume_same_layout_is_bitwise_the_run_that_never_stopped(layout, more, run_ranks, settings, tmp_path):
    settings = [*settings, *more]
    whole = at(layout, run_ranks, settings, f"output={tmp_path / 'whole'}")

    at(layout, run_ranks, settings, "train.stop_after=10")
    resumed = at(layout, run_ranks, settings)

    for (loss, streams, samples), (expected_loss, expected_streams, _) in zip(resumed, whole, strict=True):
        assert loss == expected_loss
        assert samples == [80, 160]
        for stream, states in expected_streams.items():
            assert torch.equal(streams[stream]["cpu"], states["cpu"])
    found, expected = tensors(tmp_path / "run/checkpoints"), tensors(tmp_path / "whole/checkpoints")
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        ("tp2-dp2", "dp2", []),
        ("one", "tp2-sp", []),
        ("dp2", "tp2-dp2", []),
        ("tp2-sp", "one", []),
        ("tp2-sp-pp2", "dp2", [TIED]),
        ("dp2", "tp2-sp-pp2", [TIED]),
        ("tp2", "pp2", []),
        ("dp2-zero1", "tp2", []),
        ("tp2", "pp2-dp2-zero1-full", [TIED]),
        ("pp2-dp2-zero1-full", "tp2-sp-dp2-zero1-full", [TIED]),
    ],
)
def test_resume_other_layout_equals_the_run_that_never_stopped(first, second, more, run_ranks, settings, tmp_path):
    settings = [*settings, "train.gradient_accumulation_steps=2", *more]
    [(expected_loss, _, _)] = at("one", run_ranks, settings, f"output={tmp_path / 'whole'}")

    at(first, run_ranks, settings, "train.stop_after=10")
    resumed = at(second, run_ranks, settings)

    for loss, _, _ in resumed:
        assert loss == pytest.approx(expected_loss, rel=1e-9)
    found, expected = tensors(tmp_path / "run/checkpoints"), tensors(tmp_path / "whole/checkpoints")
    names = {name for name in expected if not name.startswith("rng/")}
    assert {name for name in found if not name.startswith("rng/")} == names
    for name in names:
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-8, atol=1e-8 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bfloat16_weights_with_zero1_resume_bitwise_by_their_float32_masters(run_ranks, settings, tmp_path):
    settings = [*settings, "train.dtype=bfloat16", "train.gradient_accumulation_steps=2"]
    at("dp2-zero1", run_ranks, settings, f"output={tmp_path / 'whole'}")

    at("dp2-zero1", run_ranks, settings, "train.stop_after=10")
    at("dp2-zero1", run_ranks, settings)

    found, expected = tensors(tmp_path / "run/checkpoints"), tensors(tmp_path / "whole/checkpoints")
    masters = [name for name in expected if expected[name].dtype == torch.float32 and name.endswith("/master_weight")]
    assert len(masters) == len([name for name in expected if not name.startswith(("optimizer/", "rng/"))])
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_checkpoints_written_in_the_background_resume_bitwise(run_ranks, settings, tmp_path):
    """Every step changes the weights while the checkpoint of the step before may still be written."""
    settings = [*settings, "train.gradient_accumulation_steps=2", "checkpoint.save_every=1", "checkpoint.keep=0", TIED]
    background = "checkpoint.background=true"
    at("pp2", run_ranks, settings, f"output={tmp_path / 'whole'}", "train.steps=8")

    at("pp2", run_ranks, settings, background, "train.steps=8", "train.stop_after=4")
    at("pp2", run_ranks, settings, background, "train.steps=8")

    for step in range(1, 9):
        tag = f"step-{step:08d}"
        found = tensors(tmp_path / "run/checkpoints", tag)
        expected = tensors(tmp_path / "whole/checkpoints", tag)
        assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("save_every", [2, 0], ids=["in the run", "at its end"])
def test_background_checkpoint_that_cannot_be_written_ends_the_run_on_every_rank(run_ranks, settings, save_every):
    def run_with_small_files(settings: list[str]) -> None:
        recipe = load_recipe(None, settings)
        initialize_model_parallel(recipe.parallel.tensor_parallel_size)
        state, resumed = prepare_run(recipe)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            with StopRequest() as stop, pytest.raises(nxd_ckpt.CheckpointError, match=r"(?s)step-.*File too large"):
                run_training(state, resumed, stop)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert state.step == (2 * save_every or 5)  # before the next save, or at the end

    more = ["checkpoint.background=true", "train.steps=5", f"checkpoint.save_every={save_every}"]
    at("dp2", run_ranks, settings, *more, program=run_with_small_files)


def test_resume_same_layout_goes_on_in_every_random_stream(run_ranks, settings):
    first = at("tp2", run_ranks, settings, "train.stop_after=2", program=draw)

    second = at("tp2", run_ranks, settings, "train.stop_after=3", program=draw)

    for (_, left), (found, _) in zip(first, second, strict=True):
        for stream in ("default", "tp"):
            assert torch.equal(found[stream]["cpu"], left[stream]["cpu"]), stream


def test_resume_other_layout_begins_random_streams_that_were_not_used_before(run_ranks, settings, tmp_path):
    [(beginning, _)] = at("one", run_ranks, settings, f"output={tmp_path / 'new'}", "train.stop_after=1", program=draw)
    at("tp2", run_ranks, settings, "train.stop_after=2", program=draw)

    [(found, _)] = at("one", run_ranks, settings, "train.stop_after=3", program=draw)

    for stream in ("default", "tp"):
        assert not torch.equal(found[stream]["cpu"], beginning[stream]["cpu"]), stream


def test_resume_never_refuses_a_folder_with_checkpoints(run_ranks, settings):
    at("one", run_ranks, settings, "train.stop_after=2")

    with pytest.raises(RuntimeError, match=r"resume=never, but .* holds checkpoints up to step-00000002"):
        at("one", run_ranks, settings, "checkpoint.resume=never")


def test_resume_of_another_model_names_the_size(run_ranks, settings):
    at("one", run_ranks, settings, "train.stop_after=2")

    with pytest.raises(RuntimeError, match=r"model.num_hidden_layers is 3, the checkpoint has 2"):
        at("one", run_ranks, settings, "model.num_hidden_layers=3")


def test_resume_required_without_checkpoint_says_so(run_ranks, settings):
    with pytest.raises(RuntimeError, match=r"resume=required, but there is no complete checkpoint"):
        at("one", run_ranks, settings, "checkpoint.resume=required")


@pytest.mark.parametrize(
    ("last_step", "what"),
    [(20, r"the loss is nan in step 4"), (3, r"a weight is infinite or nan after step 3")],
    ids=["found by the loss", "found before saving"],
)
def test_diverged_run_stops_on_every_rank_and_keeps_the_checkpoint_from_before(
    run_ranks, settings, tmp_path, last_step, what
):
    at("tp2", run_ranks, settings, "train.stop_after=2")
    overflow = ["optimizer.lr=1e300", "optimizer.weight_decay=1e300", "train.max_grad_norm=0"]

    with pytest.raises(RuntimeError, match=rf"TrainingDiverged: {what}; lower optimizer.lr"):
        at("tp2", run_ranks, settings, *overflow, f"train.stop_after={last_step}")

    assert nxd_ckpt.latest(tmp_path / "run/checkpoints").step == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.held_out_fraction=0.2", r"data.held_out_fraction is 0.2, the checkpoint has 0.05"),
        ("train.dtype=float32", r"train.dtype is float32, the checkpoint has float64"),
    ],
)
def test_resume_of_another_run_names_what_differs(run_ranks, settings, change, message):
    at("one", run_ranks, settings, "train.stop_after=2")

    with pytest.raises(RuntimeError, match=message):
        at("one", run_ranks, settings, change)


def test_resume_on_other_text_of_the_same_length_is_refused(run_ranks, settings, text_folder, tmp_path):
    at("one", run_ranks, settings, "train.stop_after=2")
    (tmp_path / "other").mkdir()
    for file in text_folder.iterdir():
        (tmp_path / "other" / file.name).write_text(file.read_text().swapcase())
    by_weights = r".*checkpoint\.initial_weights=\S+ starts a new run from these weights"

    with pytest.raises(RuntimeError, match=r"data\.path is \S+other, the checkpoint has \S+;?" + by_weights):
        at("one", run_ranks, settings, f"data.path={tmp_path / 'other'}")


def test_resume_on_a_folder_that_has_changed_names_it(run_ranks, settings, text_folder, tmp_path):
    text, same = tmp_path / "text", tmp_path / "same"
    for folder in (text, same):
        shutil.copytree(text_folder, folder)
    settings = [*settings, f'data.sources={{"{text}": 1, "{same}": 1}}', "data.path=none"]
    at("one", run_ranks, settings, "train.stop_after=2")
    changed = next(text.iterdir())
    changed.write_text(changed.read_text().swapcase())

    with pytest.raises(RuntimeError, match=rf"belongs to another run: {text} or the tokenizer has changed since"):
        at("one", run_ranks, settings)


def test_resume_beside_a_damaged_checkpoint_is_refused(run_ranks, settings, tmp_path):
    at("one", run_ranks, settings, "train.stop_after=2")
    at("one", run_ranks, settings, "train.stop_after=3")
    (tmp_path / "run/checkpoints/step-00000003/manifest.json").write_text("{")

    with pytest.raises(RuntimeError, match=r"step-00000003.*remove that folder to resume without it"):
        at("one", run_ranks, settings)


def test_two_runs_in_one_folder_are_refused(run_ranks, settings):
    def run_twice() -> str:
        recipe = load_recipe(None, settings)
        initialize_model_parallel()
        first = prepare_run(recipe)
        with pytest.raises(ValueError, match="another run is using") as raised:
            prepare_run(recipe)
        del first
        prepare_run(recipe)
        return str(raised.value)

    [message] = run_ranks(run_twice, 1)
    assert message.endswith("wait for it, or choose another output folder")
