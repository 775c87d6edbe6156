"""Runs on every format of data: resumed ones equal those that never stopped, also with another number of ranks."""

import csv
import json

import numpy as np
import pytest
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import train

QUICK = ("npy", "sources", "streamed")
SIZES = ["hidden_size=16", "intermediate_size=16", "num_hidden_layers=1", "num_attention_heads=2"]
TEXTS = [f"document {number}: " + "abc def " * (number % 5 + 1) for number in range(60)]
STEPS, BATCH = 6, 4


def write_text(folder):
    (folder / "data").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"data/{number:02}.txt").write_text(text)
    return [f"data.path={folder / 'data'}"]


def write_jsonl(folder):
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return [f"data.path={folder / 'data.jsonl'}", "data.column=text"]


def write_csv(folder):
    with (folder / "data.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["text"], *([text] for text in TEXTS)])
    return [f"data.path={folder / 'data.csv'}", "data.column=text"]


def write_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "data.parquet")
    return [f"data.path={folder / 'data.parquet'}", "data.column=text"]


def write_saved_dataset(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "data")
    return [f"data.path={folder / 'data'}", "data.column=text"]


def write_dataset_of_the_hub(folder):
    """A folder that `load_dataset` takes where others give a name."""
    pytest.importorskip("datasets")
    (folder / "data").mkdir()
    write_jsonl(folder / "data")
    return [f"data.dataset={folder / 'data'}", "data.column=text"]


def tokens():
    return np.frombuffer("\n".join(TEXTS).encode(), dtype=np.uint8)


def write_npy(folder):
    np.save(folder / "data.npy", tokens().astype(np.uint16))
    return [f"data.path={folder / 'data.npy'}"]


def write_flat(folder):
    tokens().astype(np.int32).tofile(folder / "data.bin")
    return [f"data.path={folder / 'data.bin'}", "data.token_dtype=int32"]


def write_sources(folder):
    np.save(folder / "a.npy", tokens().astype(np.uint16)[:900])
    (folder / "b.txt").write_text("x" * 400)
    return [f"data.sources.{folder / 'a.npy'}=0.25", f"data.sources.{folder / 'b.txt'}=0.75"]


def write_streamed(folder, write=write_jsonl):
    """Blocks of five sequences, so that a run stops within one."""
    return [*write(folder), "data.streaming=true", "data.shuffle_buffer_size=5", "data.held_out_fraction=0"]


def write_streamed_parquet(folder):
    return write_streamed(folder, write_parquet)


def write_streamed_from_the_hub(folder):
    return write_streamed(folder, write_dataset_of_the_hub)


FORMATS = {
    "text": write_text,
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
    "saved data set": write_saved_dataset,
    "data set of the hub": write_dataset_of_the_hub,
    "npy": write_npy,
    "flat": write_flat,
    "sources": write_sources,
    "streamed": write_streamed,
    "streamed parquet": write_streamed_parquet,
    "streamed from the hub": write_streamed_from_the_hub,
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub/datasets"))
    return [
        *(f"model.{size}" for size in (*SIZES, "num_key_value_heads=1")),
        "data.sequence_length=16",
        f"train.global_batch_size={BATCH}",
        f"train.steps={STEPS}",
        "train.dtype=float64",
        "train.log_every=1",
        f"train.eval_every={STEPS}",
        "optimizer.warmup_steps=1",
        "checkpoint.save_every=0",
    ]


def run(settings):
    recipe = load_recipe(None, settings)
    initialize_model_parallel(1, 1)
    return train(recipe).step


def losses(folder):
    """Of each step, with the tokens learned so far and, after the last, what is held out; also where a run stopped."""
    records = read_records(folder / "metrics.jsonl")
    return [(it.loss, it.tokens, it.held_out_loss if it is records[-1] else None) for it in records]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [it if it in QUICK else pytest.param(it, marks=pytest.mark.slow) for it in FORMATS])
def test_resumed_run_equals_the_one_that_never_stopped(run_ranks, settings, tmp_path, name):
    settings = [*settings, *FORMATS[name](tmp_path)]
    run_ranks(run, 1, [*settings, f"output={tmp_path / 'whole'}"])

    for folder, ranks in (("same", 1), ("other", 2)):
        run_ranks(run, ranks, [*settings, f"output={tmp_path / folder}", "train.stop_after=3"])
        run_ranks(run, 1, [*settings, f"output={tmp_path / folder}"])

    expected = losses(tmp_path / "whole")
    assert len(expected) == STEPS
    assert losses(tmp_path / "same") == expected
    others = [loss for loss, *_ in losses(tmp_path / "other")]
    assert others == pytest.approx([loss for loss, *_ in expected], rel=1e-10, abs=0)


def test_run_of_epochs_ends_after_as_many_passes_and_resumes(run_ranks, settings, tmp_path):
    sequences = (len(tokens()) - 1) // 16
    settings = [it for it in settings if not it.startswith("train.steps=")]
    settings += [*write_npy(tmp_path), f"output={tmp_path / 'run'}", "data.held_out_fraction=0"]
    settings += ["train.epochs=0.5", "train.eval_every=0", "optimizer.schedule=linear"]
    steps = -(-sequences // (2 * BATCH))

    assert run_ranks(run, 1, [*settings, "train.stop_after=2"]) == [2]
    assert run_ranks(run, 1, settings) == [steps]

    records = read_records(tmp_path / "run/metrics.jsonl")
    assert records[-1].tokens == pytest.approx(sequences * 16 / 2, abs=BATCH * 16)
    assert records[-1].learning_rate < records[1].learning_rate / 5  # the schedule ends with the run
    with pytest.raises(RuntimeError, match=rf"train\.stop_after={steps + 1} is more than train\.steps={steps}"):
        run_ranks(run, 1, [*settings, f"train.stop_after={steps + 1}"])


def test_run_is_evaluated_on_the_file_that_the_recipe_names(run_ranks, settings, tmp_path):
    (tmp_path / "easy.txt").write_text("abc def " * 200)
    train_on = [*settings, f"data.path={tmp_path / 'easy.txt'}", "data.held_out_fraction=0.5", "train.steps=1"]
    np.save(tmp_path / "hard.npy", np.arange(256).repeat(3).reshape(-1, 3).T.ravel())

    def of(name, *further):
        run_ranks(run, 1, [*train_on, *further, f"output={tmp_path / name}"])
        return read_records(tmp_path / name / "metrics.jsonl")[-1]

    alone = of("alone", f"data.evaluation_path={tmp_path / 'hard.npy'}")
    whole = of("whole", "data.held_out_fraction=0")

    assert alone.loss == whole.loss  # nothing is held out of the training data
    assert whole.held_out_loss is None
    assert alone.held_out_loss == pytest.approx(np.log(257), rel=0.1)  # of tokens that training has hardly seen
