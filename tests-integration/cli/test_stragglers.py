"""A rank that is slow is named in the log and in the metrics, with by how much."""

import os
import subprocess
import sys

import pytest
from nxd_testing import deadline
from nxd_trainer.report.metrics import METRICS_FILE, read_records

SLOW = """
import os, time
import torch

class Slow(torch.optim.SGD):
    def step(self, closure=None):
        if os.environ["RANK"] == "1":
            time.sleep(0.4)
        return super().step(closure)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_slow_rank_is_named_in_log_and_metrics(tiny, tmp_path, shared_memory):
    (tmp_path / "slow.py").write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NXD_SHM": shared_memory}
    command = [
        sys.executable,
        "-m",
        "nxd_trainer",
        "train",
        "--nproc",
        "2",
        *tiny,
        "train.steps=7",
        "optimizer.factory=slow:Slow",
    ]

    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=deadline(120), check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert "rank 1 (stage 0, replica 1) is slow: it computes " in ended.stderr
    records = read_records(tmp_path / "run" / METRICS_FILE)[1:]  # the first step has much to do once
    assert {it.straggler for it in records} == {"rank 1 (stage 0, replica 1)"}
    assert min(it.slowdown for it in records) > 1.5
