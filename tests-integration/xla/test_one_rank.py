"""A world of one on torch-xla's device: the same training as on the CPU, through the same code."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict

import nxd_ckpt
import pytest
import torch
from nxd_state import destroy_model_parallel, initialize_model_parallel
from nxd_testing import deadline
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training import prepare_run
from nxd_trainer.training.step import CAN_WAIT, StepsInFlight

pytestmark = [pytest.mark.xla, pytest.mark.neuron]

SHORT = ["train.steps=4", "train.eval_every=2"]


@pytest.fixture
def start_on(tiny, tmp_path):
    """`start_on("xla", program, "output=a", ...)`: a program on a device type and settings, as a process of its own."""

    def start(device: str, program: list[str], *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *program, *tiny, *SHORT, *more],
            cwd=tmp_path,
            env={"PJRT_DEVICE": "CPU"} | os.environ | {"NXD_DEVICE": device},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def train_on(start_on):
    """`train_on("xla", "output=a", ...)`: `nxd train` on a device type, to its end."""

    def run(device: str, *more: str) -> str:
        with start_on(device, NXD_TRAIN, *more) as process:
            _, errors = process.communicate(timeout=deadline(300))
        assert process.returncode == 0, errors
        return errors

    return run


NXD_TRAIN = ["-m", "nxd_cli", "train"]


def weights(folder) -> dict[str, torch.Tensor]:
    checkpoint = nxd_ckpt.open_checkpoint(folder / "checkpoints")
    return {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(("model.", "lm_head."))}


def measures(folder) -> list[dict[str, float]]:
    """What a run has logged of each step, but for what its machine has to do with."""
    names = ("step", "tokens", "learning_rate", "loss", "grad_norm", "held_out_loss")
    records = [asdict(record) for record in read_records(folder / "metrics.jsonl")]
    return [{name: record[name] for name in names if record[name] is not None} for record in records]


def assert_same_weights(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_training_on_xla_equals_training_on_the_cpu(train_on, tmp_path):
    shown = train_on("xla", "output=xla")
    train_on("cpu", "output=cpu")

    assert "on xla" in shown
    assert_same_weights(weights(tmp_path / "xla"), weights(tmp_path / "cpu"))
    for found, expected in zip(measures(tmp_path / "xla"), measures(tmp_path / "cpu"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


def test_run_begun_on_the_cpu_goes_on_on_xla(train_on, tmp_path):
    train_on("cpu", "output=whole")

    train_on("cpu", "output=moved", "train.stop_after=2")
    shown = train_on("xla", "output=moved")

    assert "resumes from step-00000002" in shown
    assert_same_weights(weights(tmp_path / "moved"), weights(tmp_path / "whole"))


def test_run_begun_on_xla_goes_on_on_the_cpu(train_on, tmp_path):
    train_on("cpu", "output=whole")

    train_on("xla", "output=moved", "train.stop_after=2")
    shown = train_on("cpu", "output=moved")

    assert "resumes from step-00000002" in shown
    assert_same_weights(weights(tmp_path / "moved"), weights(tmp_path / "whole"))


COUNTING = """
import sys
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import train
import torch_xla.debug.metrics as metrics

initialize_model_parallel()
train(load_recipe(None, sys.argv[1:]))
print("compiled", metrics.metric_data("CompileTime")[0])
"""


@pytest.mark.parametrize("zero1", [False, True])
def test_more_steps_compile_no_more_graphs(start_on, zero1):
    settings = ["train.gradient_accumulation_steps=2", "train.eval_every=0", f"parallel.zero1={zero1}"]

    def compiled(steps: int) -> int:
        more = [*settings, f"output=run-{steps}", f"train.steps={steps}"]
        with start_on("xla", ["-c", COUNTING], *more) as process:
            output, errors = process.communicate(timeout=deadline(300))
        assert process.returncode == 0, errors
        [line] = [line for line in output.splitlines() if line.startswith("compiled ")]
        return int(line.split()[1])

    assert compiled(20) == compiled(3)


def test_several_ranks_on_the_cpu_client_are_refused_with_advice():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_DEVICE", "xla")
        patch.setenv("PJRT_DEVICE", "CPU")
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RuntimeError, match=r"use one rank, or NXD_DEVICE=cpu, or, in a test, .*run_on_replicas"):
            initialize_model_parallel()


def test_training_in_bfloat16_autocast_follows_the_cpu(train_on, tmp_path):
    train_on("cpu", "output=cpu", "train.autocast=bfloat16")
    train_on("xla", "output=xla", "train.autocast=bfloat16")

    expected = weights(tmp_path / "cpu")
    for name, tensor in weights(tmp_path / "xla").items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-2, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_loss_of_a_step_is_read_when_the_next_has_been_begun(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NXD_DEVICE", "xla")
    initialize_model_parallel()
    state, _ = prepare_run(load_recipe(None, tiny))
    steps = StepsInFlight(state)

    found = []
    for number in range(1, 4):
        steps.begin(stopping=CAN_WAIT if number == 2 else 0.0)
        found.append([step.number for step in steps.finish(all_of_them=False)])

    assert found == [[], [1], [2, 3]]  # of the second is known then that the run is to stop, so that none is left
    assert steps.stopping
    assert not steps.is_urgent
    state.train_batches.close()
    destroy_model_parallel()


def test_signal_stops_a_run_with_all_its_steps_logged_and_saved(start_on, tmp_path):
    with start_on("xla", NXD_TRAIN, "train.steps=100000", "train.eval_every=0", "checkpoint.save_every=0") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step"):
                break
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=deadline(300))

    assert process.returncode == 143, errors
    newest = nxd_ckpt.latest(tmp_path / "run/checkpoints")
    steps = [record.step for record in read_records(tmp_path / "run/metrics.jsonl")]
    assert steps == list(range(1, newest.step + 1))
