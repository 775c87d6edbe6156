"""Running `nxd` as a person does: as a process of its own, in a folder of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

TIMEOUT_SECONDS = 180


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "nxd_trainer", *arguments],
        cwd=folder,
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


def _tiny(folder: Path) -> list[str]:
    (folder / "text").mkdir()
    for number in range(4):
        (folder / f"text/{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return [
        "data.path=text",
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


@pytest.fixture(scope="session")
def nxd_in() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nxd_in(folder, "train", ...)`: runs the command there to its end."""
    return _run


@pytest.fixture
def nxd(nxd_in, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nxd("train", ...)`: runs the command in this test's folder to its end."""
    return partial(nxd_in, tmp_path)


@pytest.fixture(scope="session")
def tiny_in() -> Callable[[Path], list[str]]:
    """`tiny_in(folder)`: text in that folder, and the settings of a run on it that takes a second per rank."""
    return _tiny


@pytest.fixture
def tiny(tiny_in, tmp_path) -> list[str]:
    """Settings of a run in this test's folder that takes a second per rank."""
    return tiny_in(tmp_path)
