"""A world of one on torch-xla's device: the same training as on the CPU, through the same code."""

import os
import subprocess
import sys

import nxd_ckpt
import pytest
import torch

pytestmark = pytest.mark.xla

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
            env=os.environ | {"NXD_DEVICE": device, "PJRT_DEVICE": "CPU"},
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


def test_several_ranks_on_xla_are_refused_with_advice():
    from nxd_state import initialize_model_parallel

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_DEVICE", "xla")
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RuntimeError, match="use one rank, or NXD_DEVICE=cpu"):
            initialize_model_parallel()
