"""`nxd parity --device xla`: the layout on torch-xla's device against one process on the CPU."""

import os
import subprocess
import sys

import pytest
from nxd_testing import deadline

pytestmark = pytest.mark.xla

SIZES = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "data.sequence_length=16",
    "train.global_batch_size=2",
]


def test_training_on_the_device_equals_that_on_the_cpu(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "nxd_cli", "parity", "--device", "xla", "--compare-steps", "2", *SIZES],
        cwd=tmp_path,
        env={"PJRT_DEVICE": "CPU"} | os.environ,
        capture_output=True,
        text=True,
        timeout=deadline(300),
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "against one process (float64, tolerance 1e-10), 2 steps" in ended.stdout
    assert "72 optimizer states agree" in ended.stdout
