"""A training that is killed again and again ends with the very weights of one that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import nxd_ckpt
import pytest
import torch
from nxd_testing import deadline

KILLS = int(os.environ.get("NXD_TEST_KILLS", "10"))
SETTINGS = [
    *("train", "--nproc", "2", "parallel.zero_stage=1", "data.path=text", "data.sequence_length=16"),
    *("model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=4", "model.vocab_size=320"),
    *("train.global_batch_size=8", "train.eval_every=0", "train.log_every=1", f"train.steps={40 * KILLS}"),
    *("checkpoint.save_every=5", "checkpoint.background=true", "checkpoint.keep=2"),
]


def start(folder: Path, output: str, log: str) -> "subprocess.Popen[bytes]":
    with (folder / log).open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "nxd_cli", *SETTINGS, f"output={output}"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(pid) for pid in children.split()]


def kill_at_random(process: "subprocess.Popen[bytes]", log: Path, chance: random.Random) -> None:
    """Kill the launcher or a rank, a moment after the first step of this start."""
    give_up = time.monotonic() + deadline(120)
    while b"\nstep" not in log.read_bytes() and process.poll() is None:
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.5))
    if process.poll() is None:
        os.kill(chance.choice([process.pid, *ranks_of(process.pid)]), signal.SIGKILL)
    process.wait(deadline(120))


def final_tensors(checkpoints: Path) -> dict[str, torch.Tensor]:
    checkpoint = nxd_ckpt.open_checkpoint(checkpoints)
    assert checkpoint.damage() == []
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_killed_at_random_moments_ends_as_an_undisturbed_one(tmp_path, fresh_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", fresh_python)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/words.txt").write_text("words to be read again and again " * 500)
    chance = random.Random(0)

    for number in range(KILLS):
        process = start(tmp_path, "killed", f"{number}.txt")
        kill_at_random(process, tmp_path / f"{number}.txt", chance)
    assert start(tmp_path, "killed", "last.txt").wait(deadline(600)) == 0, (tmp_path / "last.txt").read_text()
    assert start(tmp_path, "undisturbed", "undisturbed.txt").wait(deadline(600)) == 0

    killed, undisturbed = (final_tensors(tmp_path / name / "checkpoints") for name in ("killed", "undisturbed"))
    assert killed.keys() == undisturbed.keys()
    different = [name for name, tensor in killed.items() if not torch.equal(tensor, undisturbed[name])]
    assert different == []
