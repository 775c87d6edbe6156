"""A world of one on torch-xla's device: the same training as on the CPU, through the same code."""

import os
import subprocess
import sys

import nxd_ckpt
import pytest
import torch

pytestmark = [pytest.mark.xla, pytest.mark.neuron]

SETTINGS = [
    "data.sequence_length=32",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "train.global_batch_size=4",
    "train.steps=4",
    "train.log_every=1",
    "train.eval_every=2",
    "optimizer.warmup_steps=2",
]


@pytest.fixture
def train_on(tmp_path):
    """`train_on("xla", "output=a", ...)`: `nxd train` on a device type, as a process of its own."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)

    def run(device: str, *more: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "nxd_trainer", "train", "data.path=text", *SETTINGS, *more],
            cwd=tmp_path,
            env={"PJRT_DEVICE": "CPU"} | os.environ | {"NXD_DEVICE": device},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stderr

    return run


def weights(folder) -> dict[str, torch.Tensor]:
    checkpoint = nxd_ckpt.open_checkpoint(folder / "checkpoints")
    return {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(("model.", "lm_head."))}


def assert_same_weights(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_training_on_xla_equals_training_on_the_cpu(train_on, tmp_path):
    shown = train_on("xla", "output=xla")
    train_on("cpu", "output=cpu")

    assert "on xla" in shown
    assert_same_weights(weights(tmp_path / "xla"), weights(tmp_path / "cpu"))


def test_run_begun_on_the_cpu_goes_on_on_xla(train_on, tmp_path):
    train_on("cpu", "output=whole")

    train_on("cpu", "output=moved", "train.stop_after=2")
    shown = train_on("xla", "output=moved")

    assert "goes on from step-00000002" in shown
    assert_same_weights(weights(tmp_path / "moved"), weights(tmp_path / "whole"))


def test_run_begun_on_xla_goes_on_on_the_cpu(train_on, tmp_path):
    train_on("cpu", "output=whole")

    train_on("xla", "output=moved", "train.stop_after=2")
    shown = train_on("cpu", "output=moved")

    assert "goes on from step-00000002" in shown
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
def test_more_steps_compile_no_more_graphs(tmp_path, zero1):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    settings = [*SETTINGS, "train.gradient_accumulation_steps=2", "train.eval_every=0", f"parallel.zero1={zero1}"]

    def compiled(steps: int) -> int:
        result = subprocess.run(
            [
                sys.executable,
                "-c",
                COUNTING,
                "data.path=text",
                f"output=run-{steps}",
                *settings,
                f"train.steps={steps}",
            ],
            cwd=tmp_path,
            env={"PJRT_DEVICE": "CPU"} | os.environ | {"NXD_DEVICE": "xla"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        [line] = [line for line in result.stdout.splitlines() if line.startswith("compiled ")]
        return int(line.split()[1])

    assert compiled(20) == compiled(3)


def test_several_ranks_on_the_cpu_client_are_refused_with_advice():
    from nxd_state import initialize_model_parallel

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
