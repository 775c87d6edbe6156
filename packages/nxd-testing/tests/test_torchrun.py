"""Command lines under torchrun."""

import subprocess

import pytest
from nxd_testing import run_torchrun

GREET = """
import os, sys
rank, size, example = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "EXAMPLE"))
# Each line in one write: both ranks have the same pipe, and torchrun makes Python's output unbuffered.
sys.stdout.write(f"rank {rank} of {size} got {sys.argv[1:]} and {example}\\n")
sys.stderr.write("a warning\\n")
"""

HANG = """
import os, time
def hang_on_purpose():
    print(os.getpid(), flush=True)
    time.sleep(1000)
hang_on_purpose()
"""


@pytest.fixture
def script(tmp_path):
    def write(source: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(source)
        return str(path)

    return write


def test_run_torchrun_script_runs_on_every_rank(script):
    returncode, stdout, stderr = run_torchrun([script(GREET), "--flag"], 2, env={"EXAMPLE": "yes"})

    assert returncode == 0
    assert sorted(stdout.splitlines()) == [
        "rank 0 of 2 got ['--flag'] and yes",
        "rank 1 of 2 got ['--flag'] and yes",
    ]
    assert stderr.count("a warning") == 2


def test_run_torchrun_script_that_raises_gives_its_code_and_traceback(script):
    result = run_torchrun([script("raise ValueError('boom on purpose')")], 1)

    assert result.returncode != 0
    assert "ValueError: boom on purpose" in result.stderr


@pytest.mark.slow
def test_run_torchrun_script_that_hangs_is_killed_with_its_stacks(script, fresh_interpreter):
    with pytest.raises(TimeoutError, match="did not end within timeout=") as caught:
        run_torchrun([script(HANG)], 2, timeout=10.0)

    message = str(caught.value)
    assert message.count("in hang_on_purpose") == 2
    pids = [int(line) for line in message.splitlines() if line.isdigit()]
    assert len(pids) == 2
    for pid in pids:
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return state.stdout.strip()[:1] not in ("", "Z")
