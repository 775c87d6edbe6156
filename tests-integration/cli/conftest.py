"""Running `nxd` as a person does: as a process of its own, in a folder of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from nxd_state.testing import deadline

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
            output, errors = process.communicate(timeout=deadline(TIMEOUT_SECONDS))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@pytest.fixture(scope="session")
def nxd_in() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nxd_in(folder, "train", ...)`: runs the command there to its end."""
    return _run


@pytest.fixture
def nxd(nxd_in, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`nxd("train", ...)`: runs the command in this test's folder to its end."""
    return partial(nxd_in, tmp_path)
