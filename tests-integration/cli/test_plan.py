"""`nxd plan` as a person calls it: a ranked table, a config that can be pasted, and what is wrong said in a line."""

import json
import os
import subprocess
import sys

import pytest
from nxd_testing import deadline
from nxd_trainer.recipe import load_recipe

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
JOB = ["--device", "cpu", "--global-batch-size", "8", "--microbatch-size", "1"]


@pytest.fixture
def plan(nxd, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))

    def plan(*arguments):
        return nxd("plan", "config.json", *JOB, *arguments)

    return plan


def test_the_quickest_layouts_are_shown_with_a_config_and_written_as_a_recipe(plan, tmp_path):
    done = plan("--devices", "2", "--checkpointing", "full", "--recipe", "it.toml")  # bfloat16, so with ZeRO-1
    assert done.returncode == 0, done.stderr
    headings, first = done.stdout.splitlines()[2:4]
    assert headings.split()[:6] == ["TP", "SP", "PP", "CP", "EP", "DP"]
    for shown in (
        "optimizer state",
        "nxd.neuronx_distributed_config(",
        "sent per rank and step: TP",
        "CoreAttention",
    ):
        assert shown in done.stdout
    recipe = load_recipe(tmp_path / "it.toml")
    assert recipe.parallel.tensor_parallel_size == int(first.split()[0])
    assert (recipe.parallel.zero_stage, recipe.parallel.activation_checkpointing) == (1, "full")
    assert recipe.model.num_hidden_layers == 4


def test_json_says_that_every_flag_was_obeyed_and_is_all_that_is_printed(plan, tmp_path):
    job = [
        "--devices",
        "2",
        "--dtype",
        "float32",
        "--sequence-length",
        "16",
        "--schedule",
        "gpipe",
        "--memory-gib",
        "2",
    ]
    degrees = ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "1", "--zero-stage", "0"]
    done = plan(*job, *degrees, "--num-hidden-layers", "2", "--top", "1", "--json", "--recipe", "it.toml")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (best,) = found.pop("best")
    assert found == {
        "device": "cpu",
        "num_devices": 2,
        "sequence_length": 16,
        "global_batch_size": 8,
        "dtype": "float32",
        "schedule": "gpipe",
        "usable_bytes": int(0.9 * 2 * 2**30),
        "num_fitting": 2,  # with and without checkpointing
        "too_large": [],
        "not_possible": [],
    }
    layout = best["layout"]
    assert (layout["tensor_parallel_size"], layout["pipeline_parallel_size"], layout["zero_stage"]) == (1, 2, 0)
    assert (layout["microbatch_size"], layout["num_microbatches"]) == (1, 8)
    recipe = load_recipe(tmp_path / "it.toml")
    assert (recipe.model.num_hidden_layers, recipe.parallel.pipeline_parallel_size) == (2, 2)
    assert recipe.train.dtype == "float32"


def test_a_degree_that_does_not_divide_fails_before_any_cluster_is_asked(plan):
    done = plan("--devices", "6", "--tensor-parallel-size", "3", "--pipeline-parallel-size", "1")
    assert done.returncode == 2
    assert "tensor_parallel_size=3 does not divide num_attention_heads=4" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_is_said_with_the_amount_and_what_would_help(plan):
    done = plan("--devices", "1", "--memory-gib", "0.0001", "--rejected")
    assert done.returncode == 2
    assert "more than the usable 0.1 MiB" in done.stderr
    assert "as many devices" in done.stderr
    assert "too much" in done.stdout


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "num_devices=0 must be 1 or more"),
        (["--devices", "1", "--device", "gpu"], "unknown device 'gpu'"),
        (["--devices", "1", "--schedule", "2f2b"], "schedule='2f2b'"),
        (["--devices", "1", "--sequence-length", "0"], "sequence_length=0 must be 1 or more"),
        (["--devices", "1", "--tensor-parallel-size", "0"], "tensor_parallel_size=0 must be 1 or more"),
        (["--devices", "1", "--tflops", "inf"], "flops of bfloat16=inf"),
    ],
)
def test_wrong_input_is_named_without_a_traceback(plan, arguments, message):
    done = plan(*arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert message in done.stderr


def test_a_config_without_its_keys_names_them(nxd, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = nxd("plan", "config.json", *JOB, "--devices", "1")
    assert done.returncode == 2
    assert "missing vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads" in done.stderr


def test_a_reader_that_has_seen_enough_ends_it_without_a_traceback():
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "nxd_cli", "plan", *sizes, *JOB, "--devices", "1"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=deadline(180),
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
