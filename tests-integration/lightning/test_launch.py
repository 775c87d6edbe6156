"""Scripts that start their ranks themselves, or are started by torchrun; and that end as a whole."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_testing import deadline, run_torchrun

SCRIPT = Path(__file__).parent / "programs/train.py"
TIMEOUT_SECONDS = 300


def run(folder: Path, failure: str) -> subprocess.CompletedProcess[str]:
    """Returns when no process holds the script's output any more, so when all its ranks have ended."""
    with subprocess.Popen(
        [sys.executable, SCRIPT, folder, failure],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline(TIMEOUT_SECONDS))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def losses(output: str) -> set[str]:
    return set(re.findall(r"rank \d step \d loss [\d.]+", output))


@pytest.fixture(scope="module")
def by_trainer(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """A run whose ranks the Trainer has started."""
    return run(tmp_path_factory.mktemp("trainer"), "stranger" if os.geteuid() == 0 else "none")


def test_trainer_starts_the_ranks_that_torchrun_would(by_trainer, tmp_path):
    by_torchrun = run_torchrun([str(SCRIPT), str(tmp_path / "torchrun"), "none"], 2, timeout=TIMEOUT_SECONDS)

    assert by_trainer.returncode == by_torchrun.returncode == 0, by_trainer.stderr + by_torchrun.stderr
    assert len(losses(by_trainer.stdout)) == 4
    assert losses(by_trainer.stdout) == losses(by_torchrun.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_store_of_ranks_that_the_trainer_starts_does_not_answer_another_user(by_trainer):
    assert "store answers b'ping' to this user, b'' to another" in by_trainer.stdout


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["rank0", "rank1", "interrupt"])
def test_failure_of_one_rank_and_ctrl_c_end_all_ranks(tmp_path, failure):
    result = run(tmp_path, failure)

    assert result.returncode != 0
    assert ("this rank was told to fail" in result.stderr) == (failure != "interrupt")


@pytest.mark.slow
def test_failure_of_one_rank_ends_all_ranks_under_torchrun(tmp_path):
    result = run_torchrun([str(SCRIPT), str(tmp_path), "rank1"], 2, timeout=TIMEOUT_SECONDS)

    assert result.returncode != 0
    assert "this rank was told to fail" in result.stderr
