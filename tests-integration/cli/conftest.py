"""Running `nxd` as a person does: as a process of its own, in a folder of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT_SECONDS = 180


@pytest.fixture
def nxd(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nxd("train", ...)`: runs the command to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with subprocess.Popen(
            [sys.executable, "-m", "nxd_trainer", *arguments],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    return run


@pytest.fixture
def tiny(tmp_path) -> list[str]:
    """Settings of a run that takes a second per rank."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return [
        f"data.path={Path('text')}",
        "output=run",
        "data.sequence_length=32",
        "model.hidden_size=32",
        "model.intermediate_size=64",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "train.global_batch_size=4",
        "train.steps=6",
        "train.log_every=1",
        "train.eval_every=3",
        "optimizer.warmup_steps=2",
    ]
